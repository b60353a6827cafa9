"""Real checkpoints are taught another way to decode: what a step sees, and that it helps."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import forerun
from forerun.checkpoints import adapters, resolve, tiny
from forerun.cli.models import model_rows
from forerun.errors import BadOption
from forerun.train import head_loss as head_loss_file
from forerun.train.any_subset import AnySubsetObjective
from forerun.train.block import BlockObjective
from forerun.train.head_loss import twin_loss
from forerun.train.lessons import AnswerSource, AnySubsetLesson, BlockLesson, JacobiLesson
from forerun.train.loop import add_adapters
from forerun.train.own_text import ANSWER, BEGINS, OwnText
from forerun.train.timed import Decoder, TimedRecipe, TimedRun, update

LENGTH = 32


@pytest.fixture
def network():
    return tiny.build("llama", 0, torch.float32)


def own_text(texts=40):
    """Texts that count: each token is the one before it, plus one. The first token is the text's
    own."""
    starts = np.random.default_rng(0).integers(5, 30, (texts, 1))
    tokens = (starts + np.arange(LENGTH)) % 40 + 2
    tokens[:, 0] = 50 + np.arange(texts)
    marks = np.full((texts, LENGTH), ANSWER)
    marks[:, :4] = 0
    marks[:, 0] |= BEGINS
    return OwnText(tokens.ravel().astype(np.int32), marks.ravel().astype(np.uint8))


def jacobi(**options):
    return JacobiLesson(AnswerSource(own_text(), LENGTH, 8), 8, n=4, blocks=4, **options)


def run(recipe, network, lesson, out):
    lines = []
    made = TimedRun(recipe, network, lesson, out, lines.append)
    return made, lines


def test_twins_have_the_gradients_of_cross_entropy_and_divergence(monkeypatch):
    monkeypatch.setattr(head_loss_file, "LOGITS_ON_CPU", 33)
    monkeypatch.setattr(head_loss_file, "ROWS_ON_CPU", 1)
    torch.manual_seed(0)
    text, guess = (torch.randn(8, 5, requires_grad=True) for _ in range(2))
    head = torch.randn(5, 11)
    labels = torch.randint(0, 11, (8,))
    own, taught = torch.rand(8), torch.rand(8)
    ours, likeliest = twin_loss(text, guess, head, labels, (own, taught))
    p = (text @ head).detach().log_softmax(-1)
    kl = F.kl_div((guess @ head).log_softmax(-1), p, log_target=True, reduction="none").sum(-1)
    theirs = (F.cross_entropy(text @ head, labels, reduction="none") * own + kl * taught).sum()
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(likeliest, (guess @ head).argmax(-1))
    found = torch.autograd.grad(2 * ours, (text, guess))
    for one, other in zip(found, torch.autograd.grad(2 * theirs, (text, guess))):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_guess_sees_its_block_and_the_text_before_it(network):
    """A block beside the text has the hidden states that it would have as the text's own end."""
    lesson = jacobi()
    decoder = Decoder(network)
    answers = lesson.source.batch(0, 2)
    guesses = lesson.begin(answers, decoder.vocab, 0, right=True)
    _, beside = lesson._hidden(decoder, guesses)
    for row in range(2):
        start = int(guesses.starts_B[row])
        for block in range(3):
            before = answers.tokens_BL[row, : start + 4 * block]
            alone = torch.cat([before, guesses.tokens_BG[row, 4 * block : 4 * block + 4]])
            x = network.model(alone[None]).last_hidden_state[0, -4:]
            torch.testing.assert_close(x, beside[row, 4 * block : 4 * block + 4])


@torch.no_grad()
def test_guesses_advance_as_jacobi_decoding_does(network):
    lesson = jacobi()
    decoder = Decoder(network)
    answers = lesson.source.batch(0, 2)
    guesses = lesson.begin(answers, decoder.vocab, 0, right=False)
    right = guesses.right_BG().clone()
    for step in range(4):
        said = decoder.likeliest(lesson._hidden(decoder, guesses)[1])
        known = guesses.first_wrong_BG(4)
        lesson._advance(guesses, said)
        offset = torch.arange(16) % 4
        certain = offset <= known
        assert torch.equal(guesses.tokens_BG[certain], right[certain])
        assert torch.equal(guesses.tokens_BG[~certain], said.roll(1, 1)[~certain])
        assert bool((guesses.first_wrong_BG(4) > step).all())
    assert torch.equal(guesses.tokens_BG, right)


def test_jacobi_learns_to_find_several_tokens_and_goes_on(network, tmp_path):
    recipe = TimedRecipe(steps=100, batch=8, learning_rate=5e-3, measure_every=1e3)
    made, lines = run(recipe, network, jacobi(), tmp_path)
    made.train()
    rows = (tmp_path / "curve.csv").read_text().split()
    header = rows[0].split(",")
    speed = header.index("tokens_per_forward")
    first, last = (float(row.split(",")[speed]) for row in (rows[1], rows[-1]))
    assert first < 1.05 and 1.1 < last <= 4
    again, lines = run(recipe, tiny.build("llama", 0, torch.float32), jacobi(), tmp_path)
    assert "going on" in lines[0]
    for name, weight in again.decoder.trained.items():
        assert torch.equal(weight, made.decoder.trained[name])
    again.train()
    assert again.step == made.step  # its seconds are spent
    again.write(tiny.tokenizer())
    model = forerun.load(str(tmp_path / "model"), device="cpu", dtype="float32")
    options = dict(max_tokens=12, temperature=0)
    plain = model.generate([7, 8, 9, 10], method="ar", **options)
    found = model.generate([7, 8, 9, 10], method="jacobi", **options)
    assert found.token_ids == plain.token_ids
    assert found.stats.forwards <= plain.stats.forwards


def test_a_batch_may_have_fewer_texts_than_ages(network):
    source = AnswerSource(own_text(), LENGTH, 8)
    lesson = JacobiLesson(source, 2, n=4, blocks=4, ages=4)
    for step in range(4):
        assert lesson.loss(Decoder(network), step).isfinite()


def test_no_prompt_is_both_learnt_and_held_out():
    text = own_text(20)
    twice = OwnText(np.tile(text.tokens, 2), np.tile(text.marks, 2))
    source = AnswerSource(twice, LENGTH, 8)
    held = {int(twice.tokens[first]) for first, _, _ in source.held}
    learnt = {int(twice.tokens[first]) for first, _, _ in source.spans}
    assert held and learnt and not held & learnt


def test_every_token_of_a_pair_counts_once():
    objective = BlockObjective(
        1, (4, 8), ar=0.0, causal=0.5, shifted=True, complementary=True, whole=0.2
    )
    tokens = torch.randint(5, 30, (6, 16))
    text, seen, block, causal, weight = objective.prepare(tokens, np.random.default_rng(0), 0)
    assert torch.equal(text, tokens[::2].repeat_interleave(2, 0))
    masked = seen == 1
    assert torch.equal(masked[::2, 1:], ~masked[1::2, 1:])
    assert not masked[:, 0].any()  # no row speaks of the first token
    assert torch.equal(weight > 0, masked)
    assert torch.equal(block[::2], block[1::2])
    assert torch.equal(causal[::2], causal[1::2])
    with pytest.raises(BadOption, match="even batch"):
        objective.prepare(tokens[:5], np.random.default_rng(0), 0)
    with pytest.raises(BadOption, match="ar=0"):
        BlockObjective(1, (4,), shifted=True, complementary=True)


def test_a_block_lesson_has_the_loss_of_its_objective(network):
    """Through hidden states and one head product, with nothing given and no plain loss."""
    objective = BlockObjective(1, (4, 8), ar=0.0, causal=0.5, shifted=True, complementary=True)
    text = own_text()
    text.marks[(text.marks & BEGINS) == 0] = ANSWER
    source = AnswerSource(text, LENGTH, 8)
    decoder = Decoder(network)
    ours = BlockLesson(source, objective, 8, ar_weight=0.0).loss(decoder, 3)
    tokens = source.batch(3, 4).tokens_BL.repeat_interleave(2, 0)
    drawn = objective.prepare(tokens, np.random.default_rng([0, 3, 3]), 3)
    theirs = objective.loss(network, *drawn) / drawn[4].sum() * len(tokens)
    # the objective leaves the mask token out of every law: one of 257
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-3)


def test_a_converted_block_model_decodes(network, tmp_path):
    objective = BlockObjective(
        1, (4, 8), ar=0.0, causal=0.5, shifted=True, complementary=True, whole=0.2
    )
    lesson = BlockLesson(AnswerSource(own_text(), LENGTH, 8), objective, 8)
    made, _ = run(TimedRecipe(steps=40, batch=8, learning_rate=1e-2), network, lesson, tmp_path)
    made.train()
    made.write(tiny.tokenizer())
    rows = [line.split(",") for line in (tmp_path / "curve.csv").read_text().split()]
    run_causal = rows[0].index("run_causal")
    assert float(rows[-1][run_causal]) > float(rows[1][run_causal])
    model = forerun.load(str(tmp_path / "model"), device="cpu", dtype="float32")
    assert (model.family.name, model.family.shifted, model.family.block) == ("block", True, 8)
    for method in ("block", "s2d2", "s2d2-exact"):
        result = model.generate([7, 8, 9, 10], method=method, max_tokens=12, temperature=0)
        assert len(result.token_ids) == 12


def test_an_any_subset_lesson_has_the_loss_of_its_objective(network, tmp_path):
    objective = AnySubsetObjective(1, masked=(0.3, 0.9), ahead=0.3)
    lesson = AnySubsetLesson(own_text(), None, objective, batch=4, length=16)
    decoder = Decoder(network)
    ours = lesson.loss(decoder, 5)
    drawn = objective.prepare(lesson._tokens(5), np.random.default_rng([0, 5, 4]), 5)
    torch.testing.assert_close(ours, objective.loss(network, *drawn), atol=1e-4, rtol=1e-4)


def test_adapters_of_an_any_subset_model_load_with_their_family(network, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    objective = AnySubsetObjective(1, masked=(0.3, 0.9), ahead=0.3)
    lesson = AnySubsetLesson(own_text(), None, objective, batch=4, length=16)
    recipe = TimedRecipe(steps=4, batch=4, learning_rate=3e-3, lora=4)
    base = tmp_path / "base"
    network.save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    made, _ = run(recipe, network, lesson, tmp_path)
    made.train()
    made.write(tiny.tokenizer())
    merged = forerun.load(str(tmp_path / "model"), device="cpu", dtype="float32")
    small = tmp_path / "adapters-8bit"
    canvas = [7, None, 9, None, None, 12, 13, None]
    filled = merged.infill(token_ids=canvas, method="assd").token_ids
    for folder in (tmp_path / "adapters", small):
        adapted = forerun.load(f"{base}+{folder}", device="cpu", dtype="float32")
        assert (adapted.family.name, adapted.family.mask_token) == ("any-subset", 1)
        assert adapted.infill(token_ids=canvas, method="assd").token_ids == filled
    # by name, as those that are shipped are found
    home = tmp_path / "home"
    (home / "tiny").mkdir(parents=True)
    small.rename(home / "tiny" / "any-subset")
    monkeypatch.setattr(adapters, "HOME", home)
    assert resolve.split_adapters("tiny:any-subset")[0] == "tiny"
    assert any(row.model == "tiny:any-subset" for row in model_rows())


def test_plain_adapters_are_added_as_peft_adds_them(network, tmp_path):
    peft = pytest.importorskip("peft")
    adapted = add_adapters(network, 4)
    torch.manual_seed(1)
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data.normal_(std=0.1)
    adapted.save_pretrained(tmp_path)
    fresh, other = (tiny.build("llama", 0, torch.float32) for _ in range(2))
    merged = peft.PeftModel.from_pretrained(other, str(tmp_path)).merge_and_unload()
    ours = adapters.add(fresh, str(tmp_path))
    plain = tiny.build("llama", 0, torch.float32)
    for (name, one), two, before in zip(
        ours.named_parameters(), merged.parameters(), plain.parameters()
    ):
        torch.testing.assert_close(one, two)
        assert torch.equal(one, before) == ("proj" not in name)


def test_gradients_that_are_not_finite_change_nothing():
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimiser = torch.optim.SGD([weight], 0.1)
    weight.grad = torch.full((3, 3), torch.nan)
    update(optimiser, [weight], 1.0)
    assert torch.equal(weight, torch.ones(3, 3))
    weight.grad = torch.ones(3, 3)
    update(optimiser, [weight], 1.0)
    assert not torch.equal(weight, torch.ones(3, 3))


@pytest.mark.parametrize("lora", [0, 4])
def test_lessons_run_in_half_precision_and_train_whole_weights(network, lora):
    if lora:
        pytest.importorskip("peft")
    decoder = Decoder(network, lora, torch.bfloat16)
    source = AnswerSource(own_text(), LENGTH, 8)
    block = BlockObjective(1, (4, 8), ar=0.0, causal=0.5, shifted=True, complementary=True)
    blanks = AnySubsetObjective(1, masked=(0.3, 0.9), ahead=0.3)
    for lesson in (
        jacobi(),
        BlockLesson(source, block, 8),
        AnySubsetLesson(own_text(), None, blanks, batch=4, length=16),
    ):
        lesson.loss(decoder, 0).backward()
        grads = [weight.grad for weight in decoder.trained.values()]
        assert all(grad is not None and grad.dtype == torch.float32 for grad in grads)
        assert any(bool(grad.any()) for grad in grads)
        for weight in decoder.trained.values():
            weight.grad = None
        with torch.no_grad():
            assert all(np.isfinite(value) for value in lesson.measure(decoder).values())
    assert network.get_input_embeddings().weight.dtype == torch.bfloat16
