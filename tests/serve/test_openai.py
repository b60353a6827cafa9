"""What openai-python asks is answered as it expects."""

import openai
import pytest

from forerun.serve.server import Server
from forerun.serve.settings import Settings
from tests.serve.servers import in_process, load

GREEDY = {"temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def client(live):
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def alone(source, prompt, **options):
    """What the model writes by itself."""
    return load(source).generate(prompt, **options)


def ask(text):
    return [{"role": "user", "content": text}]


def test_models_are_listed_with_what_they_promise(client):
    listed = {model.id: model for model in client.models.list()}
    assert list(listed) == ["chat", "plain", "holes", "masked", "block", "fim"]
    client.completions.create(model="holes", prompt="ab", max_tokens=1)
    told = client.models.retrieve("holes")
    assert told.max_model_len == 160
    assert told.forerun["family"] == "any-subset" and told.forerun["guarantee"] == "exact"
    assert "assd" in told.forerun["methods"] and told.forerun["fills_holes"]
    with pytest.raises(openai.NotFoundError, match="did you mean 'holes'"):
        client.models.retrieve("hole")


def test_a_completion_is_what_the_model_writes(client):
    r = client.completions.create(
        model="plain",
        prompt="hello",
        max_tokens=20,
        temperature=0,
        extra_body={"forerun": {"method": "ar"}},
    )
    result = alone("plain", "hello", max_tokens=20, method="ar")
    assert r.choices[0].text == result.text and r.object == "text_completion"
    assert r.usage.prompt_tokens == 5 and r.usage.completion_tokens == len(result.token_ids)
    assert r.forerun["method"] == "ar" and r.forerun["guarantee"] == "exact"
    assert r.forerun["forwards"] == len(result.token_ids)


def test_a_completion_has_sixteen_tokens_unless_asked_for_more(client):
    r = client.completions.create(model="plain", prompt="x", extra_body={"ignore_eos": True})
    assert r.usage.completion_tokens == 16 and r.choices[0].finish_reason == "length"


def test_the_same_seed_gives_the_same_text_and_none_gives_another(client):
    def text(**seed):
        r = client.completions.create(model="plain", prompt="hello", max_tokens=30, **seed)
        return r.choices[0].text, r.forerun["seed"]

    assert text(seed=7) == text(seed=7)
    told = text()
    assert text(seed=told[1])[0] == told[0], "the answer names the seed that it was drawn with"
    assert text()[0] != told[0]


@pytest.mark.parametrize("sampled", [GREEDY, {"temperature": 1.0, "seed": 3}])
def test_a_stream_has_the_pieces_of_the_whole(client, sampled):
    how = dict(model="plain", prompt=["hello", [104, 105]], n=2, max_tokens=24, **sampled)
    whole = client.completions.create(**how)
    texts = [""] * 4
    reasons = [None] * 4
    usage = None
    for chunk in client.completions.create(
        **how, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_a_chat_goes_through_the_template(client):
    how = dict(model="chat", messages=[{"role": "developer", "content": "brief"}, *ask("hi")])
    r = client.chat.completions.create(**how, max_completion_tokens=9, temperature=0)
    assert r.choices[0].message.content == alone("chat", "<s>brief<u>hi<a>", max_tokens=9).text
    assert r.choices[0].message.role == "assistant"
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    how["messages"][1] = {"role": "user", "content": parts}
    again = client.chat.completions.create(**how, max_tokens=9, temperature=0)
    assert again.choices[0].message.content == r.choices[0].message.content


def test_a_chat_without_a_limit_may_fill_the_context(client):
    r = client.chat.completions.create(
        model="chat", messages=ask("hi"), temperature=0, extra_body={"ignore_eos": True}
    )
    assert r.usage.total_tokens == 160 and r.choices[0].finish_reason == "length"


def test_a_chat_streams_role_text_reason_and_usage_in_this_order(client):
    how = dict(model="chat", messages=ask("hi"), max_tokens=9, **GREEDY)
    chunks = list(
        client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    whole = client.chat.completions.create(**how)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-2].forerun["forwards"] == whole.forerun["forwards"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_usage_can_be_counted_all_along(client):
    how = dict(model="chat", messages=ask("hi"), max_tokens=9, **GREEDY)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**how, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 9


def test_logprobs_of_a_chat_name_tokens_bytes_and_alternatives(client):
    how = dict(model="chat", messages=ask("hi"), max_tokens=12, logprobs=True, top_logprobs=3)
    r = client.chat.completions.create(**how, **GREEDY)
    content = r.choices[0].logprobs.content
    assert len(content) == r.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob), "greedy"
    raw = bytes(byte for entry in content for byte in entry.bytes)
    assert raw.decode(errors="ignore").startswith(r.choices[0].message.content[:3])
    streamed = []
    for chunk in client.chat.completions.create(**how, **GREEDY, stream=True):
        if chunk.choices and chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    # Twice, on a busy machine, last bits differed. Why is not known.
    logprobs = [entry.logprob for entry in content]
    assert [entry.logprob for entry in streamed] == pytest.approx(logprobs, abs=1e-4)


def test_echo_scores_the_prompt_as_evaluation_harnesses_ask(client):
    """The request of lm-eval's local-completions."""
    prompts = [[104, 101, 108, 108, 111], [97, 98, 99]]
    how = dict(prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True)
    r = client.completions.create(model="plain", **how)
    m = load("plain")
    for choice, prompt in zip(r.choices, prompts):
        told = choice.logprobs
        assert len(told.tokens) == len(prompt) + 1 and told.token_logprobs[0] is None
        [score] = m.score(prompt[:1], [prompt[1:]])
        assert told.token_logprobs[1:-1] == pytest.approx(score.logprobs, abs=1e-4)
        assert all(len(top) == 1 for top in told.top_logprobs[1:])
        assert choice.text.startswith(m.decode(prompt))


def test_echo_without_a_token_more_tells_the_prompt_alone(client):
    r = client.completions.create(
        model="plain", prompt="hello", max_tokens=0, echo=True, logprobs=0
    )
    assert r.choices[0].text == "hello" and r.usage.completion_tokens == 0
    assert len(r.choices[0].logprobs.tokens) == 5


def test_stop_and_bias_and_penalties_mean_what_they_mean_in_python(client):
    sampling = dict(presence_penalty=0.5, frequency_penalty=0.3, seed=5, temperature=0.8)
    extra = dict(top_k=20, min_p=0.01, repetition_penalty=1.2, min_tokens=2)
    r = client.completions.create(
        model="plain",
        prompt="hello",
        max_tokens=20,
        logit_bias={"101": 5},
        stop=["zz", "q"],
        top_p=0.9,
        extra_body=extra,
        **sampling,
    )
    result = alone(
        "plain",
        "hello",
        max_tokens=20,
        logit_bias={101: 5.0},
        stop=["zz", "q"],
        top_p=0.9,
        **extra,
        **sampling,
    )
    assert r.choices[0].text == result.text


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_prediction_saves_forwards_and_changes_no_law(client, temperature):
    how = dict(model="chat", messages=ask("hi"), max_tokens=40, temperature=temperature, seed=2)
    how["extra_body"] = {"ignore_eos": True, "logit_bias": {str(i): -100 for i in range(94, 257)}}
    plain = client.chat.completions.create(**how)
    expected = plain.choices[0].message.content
    r = client.chat.completions.create(**how, prediction={"type": "content", "content": expected})
    details = r.usage.completion_tokens_details
    assert r.forerun["method"] == "predicted" and r.forerun["guarantee"] == "exact"
    drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
    assert drafted == r.forerun["drafted_tokens"] > 0
    if temperature == 0:
        assert r.choices[0].message.content == expected
        assert r.forerun["forwards"] <= plain.forerun["forwards"] / 8
        assert details.accepted_prediction_tokens > 30


def test_our_own_fields_choose_method_draft_and_options(client):
    def create(**forerun):
        body = {"forerun": forerun, "ignore_eos": True}
        return client.completions.create(
            model="chat", prompt="abab", max_tokens=20, temperature=0, extra_body=body
        )

    plain = create()
    looked = create(method="lookup", options={"k": 3, "ngram": 2})
    drafted = create(method="speculative", draft="fim", options={"k": 2})
    assert plain.choices[0].text == looked.choices[0].text
    assert looked.forerun["method"] == "lookup" and looked.forerun["options"]["k"] == 3
    with_itself = create(method="speculative", draft="plain", options={"k": 2})
    assert with_itself.choices[0].text == plain.choices[0].text
    assert with_itself.forerun["draft_forwards"] > 0 and with_itself.forerun["draft"] == "plain"
    assert drafted.choices[0].text == plain.choices[0].text


def test_a_trace_is_kept_for_who_asked(client):
    body = {"forerun": {"trace": True}}
    r = client.completions.create(model="plain", prompt="ab", max_tokens=5, extra_body=body)
    told = client.get(r.forerun["trace"].removeprefix("/v1"), cast_to=object)
    assert sum(len(event["tokens"]) for event in told["events"]) == r.usage.completion_tokens
    with pytest.raises(openai.NotFoundError):
        client.get("/traces/cmpl-nothing", cast_to=object)


def test_a_trace_that_is_streamed_between_the_pieces_is_the_one_that_is_kept(client):
    body = {"forerun": {"trace": "stream"}}
    how = dict(model="masked", prompt="ab", max_tokens=6, temperature=0, extra_body=body)
    events = []
    text = ""
    for chunk in client.completions.create(**how, stream=True):
        if chunk.choices:
            text += chunk.choices[0].text
            about = getattr(chunk, "forerun", None)
        else:
            events.append(chunk.forerun["event"])
    assert sorted(p for event in events for p in event["positions"]) == list(range(2, 8))
    assert text == alone("masked", "ab", max_tokens=6).text
    assert {(event["kind"], event["request"]) for event in events} == {("commit", 0)}
    assert client.get(about["trace"].removeprefix("/v1"), cast_to=object)["events"] == events


def test_a_response_is_one_answer_with_its_events(client):
    how = dict(model="chat", input="hi", max_output_tokens=9, temperature=0, instructions="brief")
    r = client.responses.create(**how)
    assert r.output_text == alone("chat", "<s>brief<u>hi<a>", max_tokens=9).text
    assert r.status == "incomplete" and r.usage.output_tokens == 9
    events = list(client.responses.create(**how, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == r.output_text == events[-1].response.output_text


@pytest.mark.parametrize(
    "body, words",
    [
        (dict(best_of=2), "best_of"),
        (dict(temperature=-1), "temperature=-1.0 must be 0 or more"),
        (dict(n=0), "n times prompts is 0"),
        (dict(max_tokens=500), "use max_tokens=155 or less"),
        (dict(extra_body={"tempratur": 1}), "did you mean 'temperature'"),
        (dict(extra_body={"forerun": {"method": "lookpu"}}), "did you mean 'lookup'"),
        (dict(extra_body={"forerun": {"draft": "/etc/passwd"}}), "draft '/etc/passwd' is unknown"),
        (dict(extra_body={"forerun": {"metod": "ar"}}), "did you mean 'method'"),
        (dict(extra_body={"forerun": {"options": {"streams": True}}}), "option of method='auto'"),
        (dict(extra_body={"response_format": {"type": "xml"}}), "type='xml' must be 'text'"),
        (dict(logit_bias={"x": 1}), "keys must be token ids"),
        (dict(stop=[""]), "stop"),
        (dict(echo=True, logprobs=1, stream=True), "comes whole"),
    ],
)
def test_a_mistake_is_refused_with_all_four_keys_and_our_words(client, body, words):
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        client.completions.create(model="plain", prompt="hello", **body)
    assert refused.value.body.keys() == {"message", "type", "param", "code"}
    assert refused.value.type == "invalid_request_error"


def test_what_is_not_offered_is_refused_clearly(client):
    with pytest.raises(openai.BadRequestError, match="embeddings are not offered"):
        client.embeddings.create(model="plain", input="x")
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="plain", messages=ask("x"))
    loop = {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}
    with pytest.raises(openai.BadRequestError, match="must not hold chat_template"):
        client.chat.completions.create(
            model="chat", messages=ask("x"), extra_body={"chat_template_kwargs": loop}
        )
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    with pytest.raises(openai.BadRequestError, match="only text is read"):
        client.chat.completions.create(model="chat", messages=[{"role": "user", "content": image}])


def test_an_error_in_the_middle_of_a_stream_reaches_the_client(client, live):
    assert client.completions.create(model="plain", prompt="hi", max_tokens=1).choices
    live.settled("plain")
    m = live.model("plain")
    forward = m.backbone.forward
    calls = 0

    def fails_later(batch, slots):
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("out of /secret/memory")
        return forward(batch, slots)

    m.backbone.forward = fails_later
    try:
        stream = client.completions.create(
            model="plain",
            prompt="hi",
            max_tokens=9,
            stream=True,
            extra_body={"forerun": {"method": "ar"}, "ignore_eos": True},
        )
        with pytest.raises(openai.APIError, match="the server failed") as failed:
            list(stream)
    finally:
        m.backbone.forward = forward
    assert "secret" not in str(failed.value.body)
    live.settled("plain")
    assert client.completions.create(model="plain", prompt="hi", max_tokens=3).choices


def test_a_prompt_that_ends_inside_a_token_is_healed_and_echoed_once():
    server = Server.of(Settings(models=["zoo:ar"], lanes=2))
    ask = {"prompt": "import nu", "max_tokens": 4, "temperature": 0, "logprobs": 1}
    with in_process(server) as caller:
        [choice] = caller.post("/v1/completions", ask).json()["choices"]
        assert choice["text"].startswith("mpy")
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        [echoed] = caller.post("/v1/completions", {**ask, "echo": True}).json()["choices"]
        assert echoed["text"] == "import nu" + choice["text"]
        assert "".join(echoed["logprobs"]["tokens"]) == echoed["text"]
        [plain] = caller.post("/v1/completions", {**ask, "heal": False}).json()["choices"]
        assert not plain["text"].startswith("mpy")
