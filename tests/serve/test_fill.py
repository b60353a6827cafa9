"""Gaps are filled by models that can see both sides, in the interfaces that editors speak."""

import json

import pytest

import forerun
from forerun.checkpoints import tiny
from forerun.serve.fim import FimTokens, fim_prompt, fim_tokens
from tests.helpers import byte_tokenizer, sentence_tokenizer
from tests.serve.servers import FIM, in_process, load, local_server

BEFORE = "def add(a, b):\n    return "
AFTER = "\n\nprint(add(1, 2))"


@pytest.fixture(scope="module")
def server():
    with in_process() as caller:
        yield caller


def test_a_suffix_is_seen_by_models_that_fill_holes(server):
    body = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 6, "temperature": 0}
    for name in ("holes", "masked"):
        r = server.post("/v1/completions", {**body, "model": name}).json()
        editor = {"prefix": BEFORE, "suffix": AFTER, "max_tokens": 6}
        expected = load(name).infill(editor, temperature=0)
        assert r["choices"][0]["text"] == expected.fills[0]
        assert r["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_ends_what_fills_a_gap(server):
    body = {"model": "holes", "prompt": BEFORE, "suffix": AFTER, "max_tokens": 4, "temperature": 0}
    text = server.post("/v1/completions", body).json()["choices"][0]["text"]
    cut = server.post(
        "/v1/completions", {**body, "stop": [text[1:]] if text[1:] else [text]}
    ).json()
    assert cut["choices"][0]["text"] == (text[:1] if text[1:] else "")


def test_a_model_that_cannot_see_a_suffix_says_which_one_could(server):
    r = server.post("/v1/completions", {"model": "plain", "prompt": BEFORE, "suffix": AFTER})
    assert r.status_code == 400
    error = r.json()["error"]
    assert error["param"] == "suffix" and "'plain' goes from left to right" in error["message"]
    server.post("/tokenize", {"model": "holes", "prompt": "x"})  # it is known once it is loaded
    r = server.post("/v1/completions", {"model": "plain", "prompt": BEFORE, "suffix": AFTER})
    assert "'holes'" in r.json()["error"]["message"]


def test_a_causal_model_with_tokens_for_it_is_given_both_sides(server):
    m = load("fim")
    tokens = fim_tokens(m)
    assert fim_tokens(load("plain")) is None
    ids = fim_prompt(m, tokens, "ab", "c")
    text = m.decode(ids, special=True)
    assert text == "<|fim_prefix|>ab<|fim_suffix|>c<|fim_middle|>"
    body = {"model": "fim", "prompt": "ab", "suffix": "c", "max_tokens": 9, "temperature": 0}
    r = server.post("/v1/completions", body).json()
    expected = m.generate(ids, max_tokens=9, stop_token_ids=tokens.all)
    assert r["choices"][0]["text"] == expected.text


def test_mistrals_interface_answers_as_a_chat(server):
    """What Continue sends for a Mistral model's autocompletion."""
    body = {
        "model": "fim",
        "prompt": "def f(",
        "suffix": "):",
        "max_tokens": 5,
        "temperature": 0.01,
        "stop": ["\n\n"],
        "random_seed": 3,
    }
    r = server.post("/v1/fim/completions", body).json()
    assert r["object"] == "chat.completion"
    text = r["choices"][0]["message"]["content"]
    assert r["forerun"]["seed"] == 3
    streamed = server.post("/v1/fim/completions", {**body, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text


@pytest.mark.parametrize("name", ["holes", "fim"])
def test_llama_cpps_interface_answers_as_it_does(server, name):
    """What llama.vim and Continue send, settings of another engine included."""
    body = {
        "model": name,
        "input_prefix": BEFORE,
        "input_suffix": AFTER,
        "input_extra": [{"filename": "a.py", "text": "x = 1"}],
        "prompt": "",
        "n_predict": 4,
        "temperature": 0,
        "samplers": ["top_k", "infill"],
        "cache_prompt": True,
        "t_max_predict_ms": 500,
        "seed": -1,
    }
    r = server.post("/infill", body).json()
    assert r["stop"] is True and r["tokens_predicted"] <= 4 and r["model"] == name
    streamed = server.post("/infill", {**body, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["content"] for chunk in chunks) == r["content"]
    assert [chunk["stop"] for chunk in chunks][-1] is True and "[DONE]" not in streamed
    assert server.post("/infill", {**body, "n_predict": 0}).json()["content"] == ""


def test_texts_with_holes_come_back_with_their_joint_densities(server):
    texts = ["ab<|fill:2|>cd<|fill:1-3|>", "x<|fill:2|>"]
    r = server.post("/v1/infill", {"model": "holes", "text": texts, "temperature": 0}).json()
    expected = load("holes").infill(texts, temperature=0)
    assert [c["text"] for c in r["choices"]] == [e.text for e in expected]
    assert [c["fills"] for c in r["choices"]] == [list(e.fills) for e in expected]
    for choice, one in zip(r["choices"], expected):
        assert choice["logprob"] == pytest.approx(one.logprob, abs=1e-4)
    ids = server.post("/v1/infill", {"model": "masked", "token_ids": [97, None, 98], "n": 2}).json()
    assert [len(c["fill_ids"][0]) for c in ids["choices"]] == [1, 1]


@pytest.mark.parametrize(
    "body, words",
    [
        ({"text": "no hole"}, "has no hole"),
        ({"text": "a<|fill:1|>" * 70}, "holes, and 64 are the most"),
        ({"text": "a<|fill:1-99|>b"}, "99 ways"),
        ({"text": "a<|fill:1|>", "stream": True}, "comes whole"),
        ({"text": "a<|fill:1|>", "stop": ["x"]}, "no meaning for infilling"),
        ({}, "give either a text"),
        ({"text": "a<|fill:1|>", "model": "plain"}, "cannot look past a hole"),
    ],
)
def test_a_text_that_cannot_be_filled_is_refused(server, body, words):
    r = server.post("/v1/infill", {"model": "holes", **body})
    assert r.status_code == 400 and words in r.json()["error"]["message"]


def test_a_prefix_that_is_cut_inside_a_token_is_healed_where_the_middle_begins():
    """The model writes its last tokens anew, with the same bytes; the answer begins behind them."""
    tokenizer = byte_tokenizer(["a b", "ab c", "Ġ x"], FIM)
    network = tiny.build("llama", 3, vocab_size=len(tokenizer))
    with forerun.from_network(network, tokenizer, name="cut", lanes=2, max_context=160) as m:
        tokens = fim_tokens(m)
        healed = fim_prompt(m, tokens, "zab", " x")
        assert m.decode(healed, special=True) == "<|fim_prefix|>z<|fim_suffix|> x<|fim_middle|>ab"
        plain = fim_prompt(m, tokens, "zab", " x", heal=False)
        assert m.decode(plain, special=True) == "<|fim_prefix|>zab<|fim_suffix|> x<|fim_middle|>"
        longer = tokenizer.convert_tokens_to_ids("abc")
        found = m.generate(healed, max_tokens=3, logit_bias={longer: 50.0})
        assert found.token_ids[0] == longer and found.text.startswith("c")
        assert m.decode([*found.prompt_ids, *found.token_ids]).startswith("z xabc")
        last = FimTokens(tokens.prefix, tokens.suffix, None)  # the suffix first, then the prefix
        prompt = fim_prompt(m, last, "zab", " x")
        found = m.generate(prompt, max_tokens=1, logit_bias={longer: 50.0})
        assert found.text == "c"


@pytest.mark.parametrize("heal", [True, False])
def test_a_middle_keeps_its_spaces(heal):
    """Of a tokenizer that drops one at the beginning of a text, or puts one there."""
    tokenizer = sentence_tokenizer("legacy")
    tokenizer.add_tokens(FIM, special_tokens=True)
    network = tiny.build("llama", 3, vocab_size=len(tokenizer))
    spaced, longer = tokenizer.convert_tokens_to_ids(["▁b", "▁def"])
    options = dict(max_tokens=2, logit_bias={spaced: 50.0}, allowed_tokens=[spaced, longer])
    with forerun.from_network(network, tokenizer, name="cut", lanes=2, max_context=160) as m:
        tokens = fim_tokens(m)
        for prefix, healed in (("(a:", " b b"), ("de", "f b"), ("x de", "f b")):
            prompt = fim_prompt(m, tokens, prefix, "ab", heal)
            assert m.decode(prompt[-2:]).endswith("ab" if prefix == "(a:" or not heal else "de")
            expected = healed if heal else " b b"
            assert m.generate(prompt, heal=heal, **options).text == expected
            suffix = prompt[prompt.index(tokens.suffix) + 1 : prompt.index(tokens.middle)]
            assert tokenizer.convert_ids_to_tokens(suffix) == ["ab"]


def test_gaps_are_healed_unless_a_request_says_otherwise():
    served = local_server(lambda name, **_: forerun.load(name, lanes=4), models=["zoo:any-subset"])
    with in_process(served) as caller:
        body = {"model": "zoo:any-subset", "temperature": 0}
        gap = {**body, "prompt": "import nu", "suffix": "\n\ndef f():", "max_tokens": 3}
        text = {**body, "text": "import nu<|fill:2|>\n\ndef f():"}
        llama = {
            **body,
            "input_prefix": "import nu",
            "input_suffix": "\n\ndef f():",
            "n_predict": 3,
        }
        for path, asked in (("/v1/completions", gap), ("/v1/infill", text), ("/infill", llama)):
            answers = []
            for more in ({}, {"heal": False}):
                answer = caller.post(path, {**asked, **more}).json()
                [choice] = answer.get("choices", [{"text": answer.get("content")}])
                answers.append(choice["text"].removeprefix("import nu"))
            healed, plain = answers
            assert healed.startswith("mpy"), path
            assert not plain.startswith("mpy"), path
