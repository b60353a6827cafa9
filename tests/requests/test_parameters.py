"""Parameters may be objects, and may differ from prompt to prompt."""

import re
from dataclasses import dataclass, field

import pytest

import forerun
from forerun.backbones.table import TableBackbone
from forerun.certify.cases import standard_cases
from forerun.certify.enumeration import certify_case
from forerun.drafters.lookup import LookupDrafter
from forerun.errors import BadOption
from forerun.families.base import ChainScorer
from forerun.methods.speculative import SpeculativeOptions, speculative
from forerun.options import Sampling
from forerun.probability.acceptance import sample_token
from forerun.sequence.canvas import Canvas
from tests.helpers import PROMPTS, ROOT, fresh, model

HOW = dict(max_tokens=8, ignore_eos=True)


@dataclass(frozen=True)
class PlainOptions:
    word: str = field(default="sampled", metadata={"help": "what the trace says"})


@forerun.method("plain-from-a-file", guarantee="exact", reference="ar")
async def plain(seq: Canvas, target: ChainScorer, options: PlainOptions) -> None:
    """Plain decoding, defined here and nowhere else."""
    while not seq.done:
        drawn = await seq.draw(sample_token, await target.next_law(seq))
        seq.fill(seq.next(1), [drawn.token], options.word)


def test_a_method_of_a_plain_file_is_a_method():
    m = model()
    expected = m.generate(PROMPTS[0], **HOW).token_ids
    for method in (plain, "plain-from-a-file"):
        r = m.generate(PROMPTS[0], method=method, word="found", **HOW)
        assert r.token_ids == expected and r.method == "plain-from-a-file"
        assert {event.reason for event in r.trace} == {"found"}
        case = dict(eos=(2,), max_tokens=3, temperature=0.8)
        assert certify_case(method, TableBackbone(3, seed=1), [0, 1], **case).holds


def test_the_example_of_the_page_runs_from_a_plain_file(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "extending.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    source, use, proof = blocks[:3]
    assert '@method("echo"' in source and "certify_case" in proof
    (tmp_path / "echo.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    exec(use, {})
    exec(proof, {})
    assert standard_cases("echo")[0]().holds


def test_a_built_in_name_stays_built_in():
    @forerun.method("ar", guarantee="exact", reference="ar")
    async def other(seq: Canvas, target: ChainScorer, options: PlainOptions) -> None:
        """Never runs."""

    assert model().generate(PROMPTS[0], method="ar", **HOW).method == "ar"
    assert forerun.registry.method_named("ar") is not other


def test_options_are_an_object_too():
    m = model()
    how = dict(draft="lookup", **HOW)
    expected = m.generate(PROMPTS[0], method="speculative", k=2, **how)
    found = m.generate(PROMPTS[0], method=speculative, options=SpeculativeOptions(k=2), **how)
    assert found.token_ids == expected.token_ids
    assert found.stats.forwards == expected.stats.forwards
    by_class = m.generate(PROMPTS[0], method=speculative, draft=LookupDrafter, k=2, **HOW)
    assert by_class.stats.forwards == expected.stats.forwards
    with pytest.raises(BadOption, match="options= and k="):
        m.generate(PROMPTS[0], method=speculative, options=SpeculativeOptions(k=2), k=3, **how)
    with pytest.raises(BadOption, match="SpeculativeOptions"):
        m.generate(PROMPTS[0], method=speculative, options={"k": 2}, **how)


def test_sampling_is_an_object_too():
    m = model()
    how = dict(temperature=1.0, seed=3, **HOW)
    expected = m.generate(PROMPTS[0], **how).token_ids
    assert m.generate(PROMPTS[0], sampling=Sampling(**how)).token_ids == expected
    assert forerun.Sampling is Sampling
    with pytest.raises(BadOption, match="sampling= and temperature="):
        m.generate(PROMPTS[0], sampling=Sampling(), temperature=1.0)
    with pytest.raises(BadOption, match="must be a Sampling"):
        m.generate(PROMPTS[0], sampling={"temperature": 1.0})


def test_each_prompt_may_have_parameters_of_its_own():
    m = fresh(lanes=3)
    how = dict(
        method=["ar", "lookup", plain],
        seed=[1, 2, 3],
        temperature=[1.0, 0.0, 0.7],
        max_tokens=[3, 8, 5],
    )
    found = m.generate(PROMPTS[:3], ignore_eos=True, **how)
    for i, r in enumerate(found):
        own = {name: values[i] for name, values in how.items()}
        assert r.token_ids == m.generate(PROMPTS[i], ignore_eos=True, **own).token_ids
    samplings = [Sampling(temperature=1.0, seed=i, **HOW) for i in range(3)]
    found = m.generate(PROMPTS[:3], sampling=samplings)
    for i, r in enumerate(found):
        assert r.token_ids == m.generate(PROMPTS[i], sampling=samplings[i]).token_ids


def test_as_many_values_as_prompts():
    with pytest.raises(BadOption, match="seed has 2 values for 3 prompts"):
        model().generate(PROMPTS[:3], seed=[1, 2])
    with pytest.raises(BadOption, match="seed has 2 values for 1 prompts"):
        model().generate("x", seed=[1, 2])


def test_progress_is_told():
    seen = []
    model().generate(PROMPTS[:3], progress=lambda done, of: seen.append((done, of)), **HOW)
    assert seen[-1] == (3, 3)


def test_a_bar_is_shown_on_demand(capsys):
    model().generate(PROMPTS[:3], progress=True, **HOW)
    assert "3/3" in capsys.readouterr().err


def test_a_model_says_what_it_is():
    assert repr(model()) == (
        "<forerun.Model 'tiny:llama:0': family 'causal', cpu, float32, lanes=8, max_context=160>"
    )


def test_a_checkpoint_recommends_how_to_sample():
    from transformers import GenerationConfig

    m = fresh()
    assert m.default_sampling() == Sampling()
    m.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9)
    assert m.default_sampling(seed=4) == Sampling(temperature=0.6, top_p=0.9, seed=4)
    m.generation_config = GenerationConfig(repetition_penalty=1.1)
    assert m.default_sampling() == Sampling(repetition_penalty=1.1)
    assert forerun.load("tiny", lanes=1).generation_config is not None
