"""One model over several processes: every layer split by the library's own plan, our slots with it, and the same tokens."""

import json
import os
import subprocess
import sys

import pytest

import forerun
from forerun.checkpoints import tiny
from forerun.errors import BadOption, NotAble

PROGRAM = """
import json, sys
from pathlib import Path
import torch.distributed as dist
import forerun

model = forerun.load(sys.argv[1], tensor_parallel=True, dtype="float64", lanes=4, max_context=64)
prompts = [[5, 6, 7], [9], list(range(20, 31))]
found = {"heads": model.backbone.key_heads}
for method, how in json.loads(sys.argv[2]).items():
    found[method] = [r.token_ids for r in model.generate(prompts, method=method, max_tokens=12, ignore_eos=True, **how)]
Path(sys.argv[1]).with_name(f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
dist.barrier()  # nobody closes a connection that the other still reads
dist.destroy_process_group()
"""
METHODS = {"ar": {}, "jacobi": {"temperature": 0.8, "seed": 3}, "lookup": {"k": 3}, "multiblock": {"block": 5}}


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_two_processes_write_what_one_writes(arch, tmp_path):
    tiny.build(arch).save_pretrained(tmp_path / "m")
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    words += ["--max-restarts", "2"]  # gloo was once seen to abort on a busy machine; what fails for a reason fails three times
    done = subprocess.run(
        [*words, str(tmp_path / "program.py"), str(tmp_path / "m"), json.dumps(METHODS)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:6000]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0] == ranks[1] and ranks[0]["heads"] == 1  # of the two that the model has
    alone = forerun.load(str(tmp_path / "m"), dtype="float64", lanes=4, max_context=64)
    prompts = [[5, 6, 7], [9], list(range(20, 31))]
    for method, how in METHODS.items():
        expected = [r.token_ids for r in alone.generate(prompts, method=method, max_tokens=12, ignore_eos=True, **how)]
        assert ranks[0][method] == expected, method


def test_one_process_and_models_of_ours_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    tiny.build("llama").save_pretrained(tmp_path / "m")
    with pytest.raises(BadOption, match="torchrun"):
        forerun.load(str(tmp_path / "m"), tensor_parallel=True)
    for name in ("zoo:ar", "tiny"):
        with pytest.raises(NotAble, match="too small to split"):
            forerun.load(name, tensor_parallel=True)
