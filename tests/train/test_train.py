"""Training: the objective is what it says, a resumed run is the same run, and the data is what was
asked for."""

import dataclasses
import json
import lzma
import os
import signal
import subprocess
import sys

import pytest
import torch

import forerun
from forerun.errors import BadCheckpoint, BadOption
from forerun.train.autoregressive import AutoregressiveObjective
from forerun.train.data import Corpus, documents
from forerun.train.loop import learning_rate, new_network, train
from forerun.train.networks import load_network
from forerun.train.recipe import Recipe, read
from tests.helpers import ROOT, model, network, run

SHAPE = dict(
    model_type="llama",
    vocab_size=4096,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=None,
)
RECIPE = Recipe(
    objective="ar",
    model=SHAPE,
    context=32,
    batch=8,
    steps=12,
    warmup=3,
    validate_every=4,
    save_every=5,
)


def same(a, b):
    return all(
        torch.equal(x, y)
        for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def test_the_autoregressive_loss_is_the_mean_of_the_conditionals():
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    # warms nothing up but the path below is the engine's own
    scored = model().generate([tokens[0]], max_tokens=1, logprobs=0)
    assert scored.logprobs is not None
    total = 0.0
    for i in range(1, len(tokens)):
        forced = model().generate(tokens[:i], max_tokens=1, allowed_tokens=[tokens[i]], logprobs=0)
        total -= forced.logprobs[0]["logprob"]
    with torch.no_grad():
        assert float(
            AutoregressiveObjective().loss(network("llama"), torch.tensor([tokens]))
        ) == pytest.approx(total / 7, abs=1e-4)


def test_training_lowers_the_held_out_loss(corpus, tmp_path):
    rows = []
    train(
        dataclasses.replace(RECIPE, steps=60, validate_every=30),
        corpus,
        tmp_path,
        report=rows.append,
    )
    assert rows[-1]["valid_loss"] < rows[0]["valid_loss"] < 8.4
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_a_run_that_stopped_goes_on_as_if_it_had_not(corpus, tmp_path):
    whole = train(RECIPE, corpus, tmp_path / "whole")
    for stop in (3, 7, None):
        pieces = train(RECIPE, corpus, tmp_path / "pieces", stop_at=stop)
    assert same(whole, pieces)
    steps = [
        line.split(",")[0] for line in (tmp_path / "pieces" / "curve.csv").read_text().splitlines()
    ]
    assert steps == ["step", "4", "8", "12"]


def test_gradients_add_up_over_several_forwards(corpus, tmp_path):
    once = train(RECIPE, corpus, tmp_path / "once")
    parts = train(dataclasses.replace(RECIPE, accumulate=4), corpus, tmp_path / "parts")
    for a, b in zip(once.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-3)


def test_two_processes_train_the_same_model(corpus, tmp_path):
    torch.save(corpus, tmp_path / "corpus.pt")
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, torch, pathlib\n"
        "from tests.train.test_train import RECIPE\nfrom forerun.train.loop import train\n"
        "corpus = torch.load(sys.argv[1], weights_only=False)\n"
        "train(RECIPE, corpus, pathlib.Path(sys.argv[2]))\n"
    )
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        "29533",
        str(script),
    ]
    done = subprocess.run(
        [*words, str(tmp_path / "corpus.pt"), str(tmp_path / "two")],
        capture_output=True,
        text=True,
        env=_environment(),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    one = train(RECIPE, corpus, tmp_path / "one").state_dict()
    two = torch.load(tmp_path / "two" / "checkpoint.pt", weights_only=True)["network"]
    assert all(torch.allclose(one[name], two[name], atol=2e-3) for name in one)


def _environment():
    root = ROOT
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")]),
        "OMP_NUM_THREADS": "1",
    }


def test_a_checkpoint_of_another_recipe_is_refused(corpus, tmp_path):
    train(RECIPE, corpus, tmp_path, stop_at=1)
    with pytest.raises(BadOption, match="learning_rate"):
        train(dataclasses.replace(RECIPE, learning_rate=1e-4), corpus, tmp_path)


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate(step, RECIPE) for step in range(RECIPE.steps)]
    assert rates[0] < rates[1] < rates[2] == pytest.approx(RECIPE.learning_rate)
    assert rates[3:] == sorted(rates[3:], reverse=True) and rates[-1] > 0.1 * RECIPE.learning_rate


def test_batches_depend_on_the_step_and_the_seed_alone(corpus):
    again = Corpus(corpus.train, corpus.valid)
    assert torch.equal(corpus.batch(5, 4, 16, 0), again.batch(5, 4, 16, 0))
    assert not torch.equal(corpus.batch(5, 4, 16, 0), corpus.batch(6, 4, 16, 0))
    assert not torch.equal(corpus.batch(5, 4, 16, 0), corpus.batch(5, 4, 16, 1))


def test_documents_come_once_and_the_held_out_ones_stay_out(tmp_path):
    for i in range(300):
        (tmp_path / f"{i}.py").write_text(f"x = {i // 2}\n")
    found = list(documents(str(tmp_path)))
    assert len(found) == 150 and 0 < sum(held_out for _, held_out in found) < 20


def test_compressed_json_lines_bring_their_own_split(tmp_path):
    with lzma.open(tmp_path / "c.jsonl.xz", "wt") as out:
        for i in range(4):
            out.write(
                json.dumps({"text": f"a = {i}", "split": "valid" if i == 2 else "train"}) + "\n"
            )
    assert [held_out for _, held_out in documents(str(tmp_path / "c.jsonl.xz"))] == [
        False,
        False,
        True,
        False,
    ]


def test_data_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BadOption, match="no folder"):
        list(documents(str(tmp_path / "nothing")))
    with pytest.raises(BadOption, match=r"no \.py files"):
        list(documents(str(tmp_path)))


@pytest.mark.parametrize(
    "text, said",
    [
        ("objective: nope", "'nope'"),
        ("objective: ar\nsteps: 0", "steps"),
        ("objective: ar\nstepz: 5", "'steps'"),
        ("- a", "mapping"),
        ("objective: [", "YAML"),
        ("objective: ar\nbatch: 10\naccumulate: 3", "accumulate"),
    ],
)
def test_a_recipe_that_means_nothing_is_refused(tmp_path, text, said):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(BadOption, match=said):
        read(tmp_path / "r.yaml")


ANY = dataclasses.replace(RECIPE, objective="any-subset", options={"mask_token": 1, "ahead": 0.3})


def test_an_any_subset_run_that_stopped_goes_on_as_if_it_had_not(corpus, tmp_path):
    whole = train(ANY, corpus, tmp_path / "whole")
    for stop in (3, None):
        pieces = train(ANY, corpus, tmp_path / "pieces", stop_at=stop)
    assert same(whole, pieces) and whole.config.forerun == {"family": "any-subset", "mask_token": 1}
    parts = train(dataclasses.replace(ANY, accumulate=4), corpus, tmp_path / "parts")
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-3)


def test_a_validation_may_decode(corpus, tmp_path):
    rows = []
    train(
        dataclasses.replace(ANY, steps=4, decode=2, judge="zoo:ar"),
        corpus,
        tmp_path,
        report=rows.append,
    )
    assert (
        rows[-1]["perplexity"] > 1
        and rows[-1]["tokens_per_forward"] >= 1
        and rows[-1]["entropy"] > 0
    )
    assert (
        (tmp_path / "curve.csv")
        .read_text()
        .splitlines()[0]
        .endswith("entropy,perplexity,tokens_per_forward")
    )


def test_a_causal_checkpoint_becomes_an_any_subset_model(tmp_path):
    """From any causal checkpoint, whose tokenizer has no mask: it gets one, and the result loads
    and infills."""
    from forerun.checkpoints import tiny

    start = tmp_path / "start"
    tiny.build("qwen2").save_pretrained(start)
    tiny.tokenizer().save_pretrained(start)
    for i in range(120):
        (tmp_path / f"{i}.py").write_text(f"x{i} = {i}\ny = x{i} + {i}\n" * 4)
    (tmp_path / "r.yaml").write_text(
        "objective: any-subset\ncontext: 32\nbatch: 4\nsteps: 3\nwarmup: 1\nvalidate_every: "
        "2\ndecay: linear\n"
    )
    words = [
        "train",
        "any-subset",
        "--config",
        tmp_path / "r.yaml",
        "--data",
        tmp_path,
        "--out",
        tmp_path / "run",
        "--start",
        start,
    ]
    done = run(*words)
    assert done.exit_code == 0, done.exception
    trained = forerun.load(str(tmp_path / "run" / "model"))
    assert (
        trained.family.name == "any-subset"
        and trained.family.mask_token == trained.tokenizer.mask_token_id
    )
    result = trained.infill("x<|fill:3|>y", method="assd", temperature=1.0)
    assert result.stats.tokens == 3 and trained.family.mask_token not in result.token_ids
    assert "not for 'ar'" in str(
        run("train", "ar", "--config", tmp_path / "r.yaml", "--out", tmp_path).exception
    )
    assert "'any-subset'" in str(
        run("train", "any-subst", "--config", tmp_path / "r.yaml", "--out", tmp_path).exception
    )


def test_the_rate_may_fall_in_a_line_to_nothing():
    line = dataclasses.replace(RECIPE, decay="linear")
    rates = [learning_rate(step, line) for step in range(line.steps + 1)]
    assert rates[-1] == 0 and rates[3] - rates[4] == pytest.approx(rates[8] - rates[9])


def test_an_interrupted_run_keeps_its_last_step(corpus, tmp_path):
    def interrupt(row):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(RECIPE, corpus, tmp_path / "cut", report=interrupt)
    assert torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)["step"] == 4
    assert same(train(RECIPE, corpus, tmp_path / "cut"), train(RECIPE, corpus, tmp_path / "whole"))


@pytest.mark.parametrize(
    "text, said",
    [
        ("objective: masked\ncontext: 32", "model:"),
        ("objective: masked\nstart: zoo:nope", "start='zoo:nope'"),
        ("objective: masked\nstart: zoo:ar\nlearning_rate: abc", "learning_rate"),
        ("objective: masked\nstart: zoo:ar\noptions: 5", "options"),
    ],
)
def test_what_is_wrong_with_a_recipe_shows_before_any_work(tmp_path, text, said):
    (tmp_path / "r.yaml").write_text(text)
    done = run(
        "train",
        "masked",
        "--config",
        tmp_path / "r.yaml",
        "--out",
        tmp_path / "run",
        "--data",
        tmp_path,
    )
    assert said in str(done.exception) and not (tmp_path / "run").exists()


def test_a_context_longer_than_the_network_is_refused(corpus, tmp_path):
    with pytest.raises(BadOption, match="context=100"):
        train(dataclasses.replace(RECIPE, context=100), corpus, tmp_path)


def test_adapters_are_all_that_is_trained_and_end_up_in_the_weights(corpus, tmp_path):
    start = new_network(RECIPE)
    before = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    rows = []
    recipe = dataclasses.replace(RECIPE, lora=2, learning_rate=0.02, validate_every=6)
    for stop in (6, None):
        trained = train(
            recipe, corpus, tmp_path, network=new_network(RECIPE), report=rows.append, stop_at=stop
        )
    after = trained.state_dict()
    assert after.keys() == before.keys() and rows[-1]["valid_loss"] < rows[0]["valid_loss"]
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed and all(name.endswith("proj.weight") for name in changed)
    start.save_pretrained(tmp_path / "start")
    for name in (
        f"{tmp_path / 'start'}+{tmp_path / 'adapters'}",
        f"{tmp_path / 'start'}+{tmp_path / 'adapters'}/",
    ):
        again = load_network(name).state_dict()
        assert all(torch.allclose(again[key], after[key], atol=1e-6) for key in after)
        assert forerun.load(name, lanes=1).generate([3, 4], max_tokens=2).token_ids
    with pytest.raises(BadCheckpoint, match="no adapter_config"):
        forerun.load(f"{tmp_path / 'start'}+{tmp_path}")
    with pytest.raises(BadCheckpoint, match="do not fit"):
        forerun.load(f"tiny:gpt2+{tmp_path / 'adapters'}")
    with pytest.raises(BadOption, match="lora"):
        dataclasses.replace(RECIPE, lora=-1)
