"""One model over several processes writes the same tokens: the library splits every layer by its
own plan, and our slots with it."""

import json
import os
import subprocess
import sys

import pytest

import forerun
from forerun.checkpoints import tiny
from forerun.errors import BadOption, NotAble
from tests.published import LAYOUTS

PROGRAM = """
import json, sys
from pathlib import Path
import torch.distributed as dist
import forerun

found = {}
for arch, methods in json.loads(sys.argv[2]).items():
    path = str(Path(sys.argv[1]) / arch)
    model = forerun.load(path, tensor_parallel=True, dtype="float64", lanes=4, max_context=64)
    found[arch] = {"heads": model.backbone.key_heads}
    for method, options in methods.items():
        options = dict(options, method=method, max_tokens=12, ignore_eos=True)
        results = model.generate([[5, 6, 7], [9], list(range(20, 31))], **options)
        found[arch][method] = [r.token_ids for r in results]
Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
dist.barrier()  # nobody closes a connection that the other still reads
dist.destroy_process_group()
"""
METHODS = {
    "ar": {},
    "jacobi": {"temperature": 0.8, "seed": 3},
    "lookup": {"k": 3},
    "multiblock": {"block": 5},
}
DIFFUSION = {  # through adapters of ours, by their published keys
    "GSAI-ML/LLaDA-8B-Base": {"stepwise": {}, "ssd": {"block": 4}},
    "Dream-org/Dream-v0-Base-7B": {"stepwise": {"temperature": 0.8, "seed": 3}},
    "JetLM/SDAR-8B-Chat": {"block": {}, "s2d2-exact": {}},
}
ARCHITECTURES = {"llama": METHODS, "qwen3": METHODS, **DIFFUSION}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two processes write, for every architecture: they start once for all."""
    folder = tmp_path_factory.mktemp("models")
    for layout in LAYOUTS:
        if layout.name in DIFFUSION:
            layout.write(folder)
    for arch in ("llama", "qwen3"):
        tiny.build(arch).save_pretrained(folder / arch)
    (folder / "program.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--master-port", "0"]
    # gloo was once seen to abort on a busy machine; what fails for a reason fails three times
    torchrun += ["--max-restarts", "2"]
    words = [folder / "program.py", folder, json.dumps(ARCHITECTURES)]
    done = subprocess.run(
        [*torchrun, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[:6000]
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_two_processes_write_what_one_writes(arch, ranks):
    folder, (first, second) = ranks
    assert first[arch] == second[arch]
    heads = {"GSAI-ML/LLaDA-8B-Base": 2}  # half of those that the model has
    assert first[arch]["heads"] == heads.get(arch, 1)
    alone = forerun.load(str(folder / arch), dtype="float64", lanes=4, max_context=64)
    prompts = [[5, 6, 7], [9], list(range(20, 31))]
    for method, options in ARCHITECTURES[arch].items():
        options = dict(options, method=method, max_tokens=12, ignore_eos=True)
        expected = [result.token_ids for result in alone.generate(prompts, **options)]
        assert first[arch][method] == expected, method


def test_one_process_and_models_of_ours_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    tiny.build("llama").save_pretrained(tmp_path / "m")
    with pytest.raises(BadOption, match="torchrun"):
        forerun.load(str(tmp_path / "m"), tensor_parallel=True)
    for name in ("zoo:ar", "tiny"):
        with pytest.raises(NotAble, match="too small to split"):
            forerun.load(name, tensor_parallel=True)
    [mdlm] = [layout for layout in LAYOUTS if "mdlm" in layout.name]
    with pytest.raises(NotAble, match="one process is faster"):
        forerun.load(str(mdlm.write(tmp_path)), tensor_parallel=True)
