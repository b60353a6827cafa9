"""What users see: prompts in every form, sampling parameters, streaming, clear errors."""

import math
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

import forerun
from forerun.checkpoints import tiny
from forerun.errors import BadOption, NoRoom, NotAble, TokenizerMismatch
from tests.helpers import PROMPTS, fresh, model, network, settled


def test_text_ids_and_batches_are_all_prompts(tiny_model):
    one = tiny_model.generate("hello", max_tokens=5)
    ids = tiny_model.generate(tiny_model.tokenizer("hello").input_ids, max_tokens=5)
    many = tiny_model.generate(["hello", "x"], max_tokens=5)
    assert one.token_ids == ids.token_ids == many[0].token_ids and len(many) == 2


def test_a_result_says_what_it_promises(tiny_model):
    r = tiny_model.generate("hello", method="lookup", max_tokens=5)
    assert (r.method, r.guarantee, r.reference) == ("lookup", "exact", f"ar on {tiny_model.name}")
    assert r.as_dict().keys() >= {
        "text",
        "token_ids",
        "finish_reason",
        "method",
        "model",
        "guarantee",
        "reference",
        "reason",
        "stats",
    }


CACHED = dict(max_tokens=4, block=2, cache="dual")


@pytest.mark.parametrize("method", ["stepwise", "ssd", "threshold"])
def test_a_guarantee_knows_its_options(method):
    m = model("masked")
    cached = m.generate([5, 6], method=method, **CACHED)
    assert cached.guarantee == "approximate" and "last refresh" in cached.reason
    assert ("identical to stepwise under the same cache" in cached.reason) == (method == "ssd")
    plain = m.generate([5, 6], method=method, max_tokens=4, block=2)
    always_fresh = m.generate([5, 6], method=method, **CACHED, refresh=1)
    for result in (plain, always_fresh):
        assert (result.guarantee == "exact") == (method != "threshold")
        assert "refresh" not in result.reason
    holes = m.infill(token_ids=[3, None, None, 4], method=method, block=2, cache="prefix")
    assert holes.guarantee == "approximate" and "before the block" in holes.reason


def test_a_causal_reading_is_approximate_to_a_model_of_blocks():
    m = model("block")
    how = dict(method="block-stepwise", max_tokens=4)
    assert m.generate([5, 6], **how).guarantee == "exact"
    read = m.generate([5, 6], causal="text", **how)
    assert read.guarantee == "approximate" and "blocks of one token" in read.reason


def test_exactly_max_tokens_come(tiny_model):
    for method, draft in (("ar", None), ("lookup", None), ("speculative", model("llama", seed=1))):
        for n in (1, 2, 7):
            r = tiny_model.generate(
                [5, 5, 5], method=method, draft=draft, max_tokens=n, ignore_eos=True
            )
            assert len(r.token_ids) == n and r.finish_reason == "length"


def test_the_same_seed_gives_the_same_text_and_another_seed_another(tiny_model):
    how = dict(max_tokens=20, temperature=1.0)
    a, b, c = (tiny_model.generate("hi", seed=s, **how).token_ids for s in (1, 1, 2))
    assert a == b != c


def test_n_samples_differ_and_repeat(tiny_model):
    how = dict(max_tokens=10, temperature=1.0, n=3, seed=4)
    a, b = tiny_model.generate("hi", **how), tiny_model.generate("hi", **how)
    assert len(a) == 3 and len({str(r.token_ids) for r in a}) == 3
    assert [r.token_ids for r in a] == [r.token_ids for r in b]
    assert len(tiny_model.generate(["hi", "ho"], **how)) == 6


def test_a_stop_token_ends_the_text_and_belongs_to_it(tiny_model):
    whole = tiny_model.generate(PROMPTS[0], max_tokens=20, ignore_eos=True).token_ids
    for method in ("ar", "lookup"):
        r = tiny_model.generate(
            PROMPTS[0], method=method, max_tokens=20, ignore_eos=True, stop_token_ids=[whole[6]]
        )
        assert r.token_ids == whole[: whole.index(whole[6]) + 1]
        assert (r.finish_reason, r.stopped_by) == ("stop", whole[6])


@pytest.mark.parametrize("method", ["ar", "lookup", "speculative"])
def test_a_stop_string_ends_the_text_before_it(method):
    # Only letters may come, so that every token is one readable character.
    m, letters = model(), list(range(65, 91))
    how = dict(max_tokens=30, allowed_tokens=letters, temperature=1.0, seed=3, method=method)
    how["draft"] = model() if method == "speculative" else None
    whole = m.generate("ABCABC", **how)
    cut = m.generate("ABCABC", stop=[whole.text[8:10]], **how)
    at = whole.text.index(whole.text[8:10])
    assert cut.text == whole.text[:at] and cut.token_ids == whole.token_ids[: at + 2]
    assert (cut.finish_reason, cut.stopped_by) == ("stop", whole.text[8:10])


def test_min_tokens_keeps_the_end_away(tiny_model):
    how = dict(max_tokens=30, logit_bias={tiny.VOCAB - 1: 50.0})
    assert len(tiny_model.generate("hi", **how).token_ids) == 1
    r = tiny_model.generate("hi", min_tokens=7, **how)
    assert len(r.token_ids) == 8 and r.token_ids[-1] == tiny.VOCAB - 1


def test_ignore_eos_goes_on_past_the_end(tiny_model):
    r = tiny_model.generate("hi", max_tokens=5, logit_bias={tiny.VOCAB - 1: 50.0}, ignore_eos=True)
    assert r.token_ids == [tiny.VOCAB - 1] * 5


@pytest.mark.parametrize("method", ["ar", "lookup", "speculative"])
def test_logprobs_are_the_models_own_and_the_sampled_laws(method):
    m = model()
    how = dict(
        max_tokens=12, temperature=0.7, top_k=20, seed=1, logprobs=3, ignore_eos=True, method=method
    )
    r = m.generate(
        PROMPTS[0], draft=model("llama", seed=1) if method == "speculative" else None, **how
    )
    with torch.inference_mode():
        logits = (
            network("llama")(torch.tensor([[*PROMPTS[0], *r.token_ids]]))
            .logits[0, len(PROMPTS[0]) - 1 : -1]
            .double()
        )
    raw, warm = logits.log_softmax(-1), logits / 0.7
    kept = warm.masked_fill(warm < warm.topk(20).values[:, -1:], -math.inf).log_softmax(-1)
    assert len(r.logprobs) == 12
    for i, entry in enumerate(r.logprobs):
        assert entry["token"] == r.token_ids[i]
        assert entry["logprob"] == pytest.approx(float(raw[i, entry["token"]]), abs=1e-4)
        assert entry["sampled_logprob"] == pytest.approx(float(kept[i, entry["token"]]), abs=1e-4)
        assert [t["token"] for t in entry["top"]] == raw[i].topk(3).indices.tolist()


def test_logprobs_cost_nothing_in_what_is_generated(tiny_model):
    how = dict(max_tokens=10, temperature=1.0, method="lookup", seed=2)
    assert (
        tiny_model.generate("abab", **how).token_ids
        == tiny_model.generate("abab", logprobs=0, **how).token_ids
    )


def test_the_trace_is_the_output(tiny_model):
    r = tiny_model.generate(PROMPTS[3], method="lookup", k=3, max_tokens=15, ignore_eos=True)
    committed = sorted((p, t) for e in r.trace for p, t in zip(e.positions, e.tokens))
    assert [t for _, t in committed] == r.token_ids
    assert [p for p, _ in committed] == list(range(len(PROMPTS[3]), len(PROMPTS[3]) + 15))
    assert all(e.drafted[len(e.tokens) :] == e.rejected for e in r.trace if e.drafted)
    assert {e.reason for e in r.trace} <= {"accepted", "resampled", "bonus", "sampled"}
    assert max(e.forward for e in r.trace) == r.stats.forwards


def test_streaming_yields_the_text_in_pieces(tiny_model):
    letters = list(range(65, 91))
    how = dict(max_tokens=20, allowed_tokens=letters, temperature=1.0, method="lookup")
    pieces = list(tiny_model.stream("ABAB", **how))
    assert "".join(pieces) == tiny_model.generate("ABAB", **how).text and len(pieces) > 3
    stream = tiny_model.stream("ABAB", **how)
    assert "".join(stream) == stream.results[0].text


def test_streams_of_a_batch_come_with_their_index(tiny_model):
    how = dict(max_tokens=12, allowed_tokens=list(range(65, 91)), temperature=1.0)
    texts = ["", ""]
    for index, piece in tiny_model.stream(["AB", "XY"], **how):
        texts[index] += piece
    assert texts == [r.text for r in tiny_model.generate(["AB", "XY"], **how)]


def test_streams_show_nothing_that_a_stop_string_takes_back():
    m = model()
    how = dict(max_tokens=30, allowed_tokens=[65, 66], temperature=1.0, seed=9, stop="AAB")
    pieces = list(m.stream("AB", **how))
    assert "".join(pieces) == m.generate("AB", **how).text


@pytest.mark.parametrize("method", ["ar", "lookup"])
def test_a_stream_that_ends_inside_of_what_may_be_a_stop_string_says_all(tiny_model, method):
    how = dict(method=method, max_tokens=9, ignore_eos=True)
    text = tiny_model.generate("abcab", **how).text
    pieces = list(tiny_model.stream("abcab", stop=[text[-2:] + "never"], **how))
    assert "".join(pieces) == text


def test_closing_a_stream_frees_its_lane():
    m = fresh(lanes=1)
    stream = m.stream("ABAB", max_tokens=100, allowed_tokens=[65, 66])
    next(stream)
    stream.close()
    assert settled(m).engine.free_lanes == [0]


def test_text_never_ends_in_half_a_character(tiny_model):
    # The three bytes of one character, the last of them cut off by max_tokens.
    euro = tiny_model.tokenizer("€").input_ids
    for n, text in ((2, ""), (3, "€")):
        assert fresh_script(euro)(n).text == text


def fresh_script(tokens):
    """Generate exactly these tokens by forbidding all others step by step."""
    m = fresh()

    def run(n):
        seen = []

        def forced(batch, slots):
            logits = torch.full((len(batch.reads_R), m.vocab), -100.0)
            logits[:, tokens[len(seen) % len(tokens)]] = 0
            seen.append(1)
            return logits

        m.backbone.forward = forced
        return m.generate("x", max_tokens=n)

    return run


def test_chat_messages_go_through_the_template():
    m = fresh()
    m.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat = [{"role": "user", "content": "hi"}]
    r = m.generate(messages=chat, max_tokens=4)
    assert r.prompt_ids == m.tokenizer("<user>hi<assistant>").input_ids
    assert len(m.generate(messages=[chat, chat], max_tokens=2)) == 2


class TestNothingIsPossible:
    """Laws without mass: the request that asks for them fails, its neighbours do not."""

    def test_end_tokens_alone_cannot_fill_a_minimum_length(self, tiny_model):
        end = tiny.VOCAB - 1
        with pytest.raises(BadOption, match="allowed_tokens"):
            tiny_model.generate("x", allowed_tokens=[end], min_tokens=3, max_tokens=4)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("method", ["ar", "lookup"])
    @pytest.mark.filterwarnings("ignore:.* have an error")
    def test_logits_that_are_no_numbers_fail_alone(self, method, temperature):
        m = fresh(lanes=2)
        expected = m.generate(
            [4, 5], max_tokens=6, ignore_eos=True, method=method, temperature=temperature
        ).token_ids
        original = m.backbone.forward

        def poisoned(batch, slots):
            logits = original(batch, slots)
            bad = [
                s.offset <= int(r) < s.offset + s.rows and s.plan.rows[0, 0] == 9
                for r in batch.reads_R
                for s in batch.segments
            ]
            mask = torch.tensor(bad).view(len(batch.reads_R), -1).any(-1)
            return logits.masked_fill(mask[:, None], math.nan)

        m.backbone.forward = poisoned
        how = dict(max_tokens=6, ignore_eos=True, method=method, temperature=temperature)
        bad, good = m.generate([[9, 9], [4, 5]], **how)
        assert (
            bad.finish_reason == "error"
            and "no token is possible" in str(bad.error)
            and bad.token_ids == []
        )
        assert good.token_ids == expected

    def test_a_tiny_temperature_is_greedy(self, tiny_model):
        greedy = tiny_model.generate("hello", max_tokens=5, ignore_eos=True).token_ids
        assert (
            tiny_model.generate("hello", max_tokens=5, ignore_eos=True, temperature=1e-40).token_ids
            == greedy
        )


def test_bias_on_a_forbidden_token_leaves_it_forbidden(tiny_model):
    r = tiny_model.generate("x", max_tokens=5, allowed_tokens=[3], logit_bias={8: 99.0})
    assert r.token_ids == [3] * 5


def test_the_default_length_is_what_the_context_leaves(tiny_model):
    assert len(tiny_model.generate([1] * 150, ignore_eos=True).token_ids) == 10
    assert len(fresh().generate([1], ignore_eos=True, min_tokens=140).token_ids) == 140


def test_numpy_and_torch_prompts_and_numbers_are_welcome(tiny_model):
    import numpy as np

    expected = tiny_model.generate([1, 2, 3], max_tokens=3).token_ids
    assert tiny_model.generate(np.array([1, 2, 3]), max_tokens=np.int64(3)).token_ids == expected
    assert (
        tiny_model.generate(
            torch.tensor([1, 2, 3]), max_tokens=3, temperature=np.float32(0)
        ).token_ids
        == expected
    )
    assert [r.token_ids for r in tiny_model.generate(torch.tensor([[1, 2, 3]]), max_tokens=3)] == [
        expected
    ]


def test_more_alternatives_than_tokens_are_all_tokens():
    small = forerun.from_network(tiny.build("llama", vocab_size=20, eos_token_id=19), None, lanes=1)
    assert len(small.generate([1, 2], max_tokens=1, logprobs=50).logprobs[0]["top"]) == 20


def test_an_end_token_outside_the_vocabulary_is_no_end_token():
    m = forerun.from_network(
        tiny.build("llama", eos_token_id=[256, 300]), tiny.tokenizer(), lanes=1
    )
    assert m.eos == {256} and len(m.generate("x", max_tokens=4, min_tokens=2).token_ids) >= 2


def test_acceptance_is_counted_by_hand():
    """Prompt 5 5 5: the copy is judged against a model that always says 5, then against one that
    never does."""
    m = fresh()
    for token, rate, histogram in ((5, 1.0, {3: 1, 2: 1}), (6, 0.0, {0: 2})):
        m.backbone.forward = lambda batch, slots, token=token: torch.nn.functional.one_hot(
            torch.full((len(batch.reads_R),), token), m.vocab
        ).float()
        how = dict(method="lookup", k=3, adapt=False, ignore_eos=True)
        s = m.generate([5, 5, 5], max_tokens=7 if token == 5 else 2, **how).stats
        drafted = {5: 1.0, 6: 0.0}[token]
        assert s.acceptance_rate == drafted == rate
        if token == 5:
            assert (
                s.acceptance_histogram == histogram
                and s.acceptance_length == 3.5
                and s.forwards == 2
            )
        else:
            assert s.acceptance_length == 1.0 and 0 in s.acceptance_histogram


def test_a_stop_inside_an_accepted_draft_is_no_rejection():
    m = fresh()
    five = m.tokenizer("5").input_ids[0]
    m.backbone.forward = lambda batch, slots: torch.nn.functional.one_hot(
        torch.full((len(batch.reads_R),), five), m.vocab
    ).float()
    r = m.generate("555", method="lookup", k=6, adapt=False, stop="55", max_tokens=20)
    assert r.text == "" and r.stats.acceptance_rate == 1.0 and r.token_ids == [five, five]


def test_closing_a_stream_that_never_started_cancels_it():
    m = fresh(lanes=1)
    closed = m.stream("ABAB", max_tokens=100, ignore_eos=True)
    closed.close()
    assert settled(m) and closed.results[0].finish_reason == "cancelled"
    m.stream("ABAB", max_tokens=100)  # let go of at once
    assert settled(m).engine.free_lanes == [0]


@pytest.fixture
def heard_ctrl_c():
    """A process that was started in the background hears no interrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_generate_leaves_nothing_running(heard_ctrl_c):
    m = fresh(lanes=1)
    original = m.backbone.forward

    def interrupt(batch, slots):
        os.kill(os.getpid(), signal.SIGINT)  # to the main thread, as Ctrl-C does
        time.sleep(0.05)
        return original(batch, slots)

    m.backbone.forward = interrupt
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        m.generate("x", max_tokens=50, ignore_eos=True)
    assert time.monotonic() - began < 1
    m.backbone.forward = original
    assert settled(m).engine.free_lanes == [0]


def test_what_goes_wrong_while_decoding_one_prompt_is_raised():
    m = fresh()

    def broken(batch, slots):
        raise RuntimeError("out of memory")

    m.backbone.forward = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        m.generate("x", max_tokens=3)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(m.stream("x", max_tokens=3))


class TestBadInput:
    def refused(self, error, words, call):
        with pytest.raises(error) as caught:
            call()
        for word in words:
            assert word in str(caught.value), caught.value

    def test_an_unknown_method_names_the_known_ones(self, tiny_model):
        self.refused(
            BadOption, ["'lokup'", "'lookup'"], lambda: tiny_model.generate("x", method="lokup")
        )

    def test_an_unknown_option_names_the_closest(self, tiny_model):
        self.refused(
            BadOption,
            ["'temprature'", "'temperature'"],
            lambda: tiny_model.generate("x", temprature=1),
        )

    def test_another_methods_option_is_unknown(self, tiny_model):
        self.refused(BadOption, ["'k'", "'auto'"], lambda: tiny_model.generate("x", k=3))

    def test_a_draft_for_a_method_that_does_not_draft(self, tiny_model):
        self.refused(
            BadOption,
            ["draft=", "'ar'"],
            lambda: tiny_model.generate("x", method="ar", draft="tiny"),
        )

    def test_speculation_without_a_draft(self, tiny_model):
        self.refused(
            BadOption,
            ["needs draft=", "'lookup'"],
            lambda: tiny_model.generate("x", method="speculative"),
        )

    def test_a_drafter_for_a_method_that_drafts_with_a_model(self, tiny_model):
        self.refused(
            BadOption,
            ["draft='ngram'", "'specdiff'", "fills blanks"],
            lambda: tiny_model.generate("x", method="specdiff", draft="ngram"),
        )

    def test_a_draft_with_other_words_names_both(self, tiny_model):
        other = forerun.from_network(tiny.build("llama"), tiny.tokenizer(), name="other", lanes=1)
        names = [f"<{i}>" for i in range(other.vocab)]
        other.tokenizer = SimpleNamespace(
            get_vocab=lambda: {name: i for i, name in enumerate(names)},
            batch_decode=lambda ids, **_: [names[i] for [i] in ids],
        )
        said = ["'other'", tiny_model.name, "share only 0"]
        self.refused(
            TokenizerMismatch,
            said,
            lambda: tiny_model.generate("x", method="speculative", draft=other),
        )

    def test_a_draft_with_a_few_more_tokens_drafts(self, tiny_model):
        longer = forerun.from_network(
            tiny.build("llama", 0, torch.float32), tiny.tokenizer(), name="longer", lanes=1
        )
        longer.tokenizer.add_tokens(["<extra>"])
        plain = tiny_model.generate("x", max_tokens=12, ignore_eos=True)
        fast = tiny_model.generate(
            "x", method="speculative", draft=longer, max_tokens=12, ignore_eos=True
        )
        assert fast.token_ids == plain.token_ids and fast.stats.forwards < plain.stats.forwards

    def test_a_prompt_longer_than_the_context(self, tiny_model):
        self.refused(BadOption, ["200 tokens", "160"], lambda: tiny_model.generate([1] * 200))

    def test_more_tokens_than_the_context_holds(self, tiny_model):
        self.refused(
            BadOption,
            ["max_tokens=100", "max_tokens=60"],
            lambda: tiny_model.generate([1] * 100, max_tokens=100),
        )

    @pytest.mark.filterwarnings("ignore:.* have an error")
    def test_an_empty_prompt_and_a_draft_that_needs_one(self):
        target = forerun.load("tiny:block", lanes=2, max_context=64)
        how = dict(method="speculative", draft="tiny:llama", max_tokens=4, ignore_eos=True)
        self.refused(BadOption, ["empty", "tiny:llama"], lambda: target.generate("", **how))
        empty, good = target.generate([[], [5, 6]], **how)
        # the neighbour is not harmed
        assert "tiny:llama" in str(empty.error) and len(good.token_ids) == 4
        assert (
            len(target.generate("", method="s2d2-exact", max_tokens=4, ignore_eos=True).token_ids)
            == 4
        )

    def test_an_empty_prompt(self, tiny_model):
        for empty in ("", []):
            self.refused(
                BadOption,
                ["empty" if empty == "" else "prompt"],
                lambda empty=empty: tiny_model.generate(empty),
            )

    def test_a_token_id_that_does_not_exist(self, tiny_model):
        self.refused(BadOption, ["9999", "256"], lambda: tiny_model.generate([1, 9999]))
        self.refused(
            BadOption,
            ["stop_token_ids", "9999"],
            lambda: tiny_model.generate("x", stop_token_ids=[9999]),
        )

    @pytest.mark.parametrize(
        "prompt", [5, b"hello", {"a": 1}, [True, False], [1.5], None], ids=repr
    )
    @pytest.mark.filterwarnings("ignore:.* have an error")
    def test_a_prompt_of_the_wrong_kind(self, tiny_model, prompt):
        with pytest.raises(BadOption, match="prompt"):
            results = tiny_model.generate(prompt, max_tokens=2)
            raise results[0].error

    @pytest.mark.parametrize(
        "options",
        [
            {"stop": 5},
            {"stop": None},
            {"stop_token_ids": 178},
            {"stop_token_ids": "178"},
            {"allowed_tokens": 5},
            {"logprobs": "3"},
            {"logprobs": 1.5},
            {"logit_bias": {"a": 3}},
            {"logit_bias": [(1, 2)]},
            {"logit_bias": {65: 3.5e38}},
            {"ignore_eos": "no"},
            {"frequency_penalty": 1e39},
            {"repetition_penalty": 1e-40},
        ],
        ids=repr,
    )
    def test_options_of_the_wrong_kind(self, tiny_model, options):
        with pytest.raises(BadOption, match=next(iter(options))):
            tiny_model.generate("x", **options)

    def test_a_draft_that_is_nowhere_is_blamed_on_the_draft(self, tiny_model):
        self.refused(
            forerun.ForerunError,
            ["draft='nope'"],
            lambda: tiny_model.generate("x", method="speculative", draft="nope"),
        )

    def test_prompt_and_messages_together(self, tiny_model):
        self.refused(
            BadOption,
            ["prompt", "messages"],
            lambda: tiny_model.generate("x", messages=[{"role": "user", "content": "y"}]),
        )

    def test_messages_without_a_template(self, tiny_model):
        self.refused(
            BadOption,
            ["chat template"],
            lambda: tiny_model.generate(messages=[{"role": "user", "content": "y"}]),
        )

    def test_text_without_a_tokenizer(self):
        bare = forerun.from_network(tiny.build("llama"), None, lanes=1)
        self.refused(BadOption, ["no tokenizer"], lambda: bare.generate("x"))
        assert len(bare.generate([1, 2], max_tokens=3, ignore_eos=True).token_ids) == 3

    def test_lanes_that_do_not_fit_say_how_many_would(self):
        self.refused(NoRoom, ["lanes=10000000", "would fit"], lambda: fresh(lanes=10_000_000))

    def test_the_context_that_memory_has_room_for(self, monkeypatch):
        whole = forerun.load("zoo:ar", lanes=1)
        lane = whole.backbone.bytes_per_lane(whole.family.slots(256))
        for module in ("forerun.api", "forerun.engine.cache"):
            monkeypatch.setattr(f"{module}.available_bytes", lambda device: int(2.5 * lane))
        assert whole.context > 256 and forerun.load("zoo:ar", lanes=2).context == 256
        assert len(forerun.load("zoo:ar", lanes=2).generate("x = 1", max_tokens=3).token_ids) <= 3
        self.refused(
            NoRoom,
            ["lanes=2", "max_context=512"],
            lambda: forerun.load("zoo:ar", lanes=2, max_context=512),
        )

    def test_a_bad_device_dtype_or_number_of_lanes(self):
        self.refused(BadOption, ["device='gpu9'"], lambda: forerun.load("tiny", device="gpu9"))
        self.refused(
            BadOption, ["'float31'", "float32"], lambda: forerun.load("tiny", dtype="float31")
        )
        self.refused(BadOption, ["lanes=0"], lambda: forerun.load("tiny", lanes=0))
        self.refused(
            BadOption, ["max_context=99999", "512"], lambda: forerun.load("tiny", max_context=99999)
        )
        if not torch.cuda.is_available():
            self.refused(BadOption, ["cuda", "cpu"], lambda: forerun.load("tiny", device="cuda"))

    def test_a_method_that_the_family_cannot_run(self, tiny_model):
        from forerun.families.base import BlankFiller
        from forerun.registry import method

        @method("paint", guarantee="approximate", reference="paint")
        async def paint(seq, target: BlankFiller):
            """Fill blanks."""

        with pytest.raises(NotAble, match=r"'paint'.*fills blanks.*'ar'"):
            paint.check(tiny_model.family, tiny_model.name)

    @pytest.mark.filterwarnings("ignore:.* have an error")
    def test_in_a_batch_one_bad_request_fails_alone(self, tiny_model):
        good, empty, long, also_good = tiny_model.generate(
            ["hi", "", [1] * 500, "ho"], max_tokens=4, ignore_eos=True
        )
        assert (empty.finish_reason, long.finish_reason) == ("error", "error")
        assert "empty" in str(empty.error) and "500" in str(long.error)
        assert len(good.token_ids) == len(also_good.token_ids) == 4
        assert "error" in empty.as_dict() and "error" not in good.as_dict()


def test_two_who_iterate_over_the_same_requests_both_end():
    jobs = fresh().submit(["hi", "ho"], max_tokens=4, ignore_eos=True, streams=True)
    first = iter(jobs)
    next(first)
    assert list(jobs) and list(first) == []


def test_a_shorter_draft_context_bounds_the_request():
    small = forerun.from_network(
        tiny.build("llama", 1), tiny.tokenizer(), name="small", lanes=1, max_context=32
    )
    m = fresh()
    with pytest.raises(BadOption, match="'small'"):
        m.generate([1] * 20, method="speculative", draft=small, max_tokens=20)
    assert (
        len(
            m.generate(
                [1] * 20, method="speculative", draft=small, max_tokens=12, ignore_eos=True
            ).token_ids
        )
        == 12
    )


def test_a_draft_has_its_target_s_numbers_where_they_are_half():
    m = forerun.load("tiny:llama", dtype="bfloat16", lanes=1)
    assert m.draft_model("tiny:llama:1").backbone.dtype == torch.bfloat16
    assert fresh().draft_model("tiny:llama:1").backbone.dtype == torch.float32
