"""Keys, origins, sizes, logs and shapes: what every request goes through."""

import hashlib
import hmac
import io
import json
import logging

import pytest

from forerun.serve import server as server_file
from forerun.serve.app import create_app
from forerun.serve.middleware import JsonLines
from forerun.serve.settings import Settings
from tests.serve.servers import in_process, local_server

ASK = {"model": "plain", "prompt": "my secret prompt", "max_tokens": 2}


@pytest.fixture(scope="module")
def server():
    with in_process() as caller:
        yield caller


def test_without_a_key_nothing_is_answered_but_what_watchers_ask():
    with in_process(api_keys=["right", "other"]) as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer "}):
            for path in ("/v1/completions", "/v1/chat/completions", "/infill", "/tokenize"):
                r = server.post(path, ASK, headers=headers)
                assert r.status_code == 401 and r.json()["error"]["code"] == "invalid_api_key"
            assert server.get("/v1/models", headers=headers).status_code == 401
        for key in ("right", "other"):
            headers = {"authorization": f"Bearer {key}"}
            assert server.post("/v1/completions", ASK, headers=headers).status_code == 200
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert server.get(path).status_code == 200


def test_keys_are_compared_in_constant_time_and_all_of_them(monkeypatch):
    compared = []

    def compare(a, b):
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    with in_process(api_keys=["right", "a much longer key"]) as server:
        headers = {"authorization": "Bearer right"}
        assert server.get("/v1/models", headers=headers).status_code == 200
    size = hashlib.sha256().digest_size
    assert compared == [(size, size)] * 2, "digests of one length, and no early exit"
    assert server_file.hmac is hmac


def test_a_trace_is_for_the_client_that_asked():
    with in_process(api_keys=["one", "two"]) as server:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {**ASK, "forerun": {"trace": True}}
        path = server.post("/v1/completions", body, headers=one).json()["forerun"]["trace"]
        assert server.get(path, headers=one).status_code == 200
        assert server.get(path, headers=two).status_code == 404


def test_pages_of_other_origins_may_ask_only_if_told(server):
    origin = {"origin": "https://elsewhere.example"}
    assert "access-control-allow-origin" not in server.get("/health", headers=origin).headers
    with in_process(cors=["https://elsewhere.example"]) as open_server:
        told = open_server.get("/health", headers=origin).headers
        assert told["access-control-allow-origin"] == "https://elsewhere.example"
        other = open_server.get("/health", headers={"origin": "https://third.example"}).headers
        assert "access-control-allow-origin" not in other


def test_a_body_that_is_too_long_is_refused_whether_it_says_so_or_not():
    with in_process(max_body=1000) as server:
        long = {**ASK, "prompt": "x" * 2000}
        assert server.post("/v1/completions", long).status_code == 413

        async def pieces():
            for _ in range(30):
                yield b"x" * 100

        r = server.request(
            "POST",
            "/v1/completions",
            content=pieces(),
            headers={"content-type": "application/json"},
        )
        assert r.status_code == 413 and "1000 bytes" in r.json()["error"]["message"]
        assert server.post("/v1/completions", ASK).status_code == 200


def test_every_answer_has_the_number_of_its_request(server):
    assert server.get("/health").headers["x-request-id"]
    given = server.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"]
    assert given == "mine-1"
    bad = server.get("/health", headers={"x-request-id": "a b;c"}).headers["x-request-id"]
    assert bad != "a b;c"


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.fixture
def lines():
    """What the server logs."""
    log = logging.getLogger("forerun.serve")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    log.removeHandler(handler)
    log.setLevel(level)


def test_the_log_has_a_line_for_each_request_and_no_prompt(server, lines):
    r = server.post("/v1/completions", ASK, headers={"x-request-id": "r-7"}).json()
    told = {line["message"]: line for line in lines()}
    assert told["decoded"]["id"] == r["id"] and told["decoded"]["request_id"] == "r-7"
    assert told["request"]["status"] == 200 and told["request"]["path"] == "/v1/completions"
    assert "secret" not in json.dumps(lines())


def test_the_log_has_prompts_if_asked(lines):
    with in_process(log_prompts=True) as server:
        server.post("/v1/completions", ASK)
    assert "my secret prompt" in json.dumps(lines())


def test_a_full_disk_under_the_log_harms_nobody(server, monkeypatch):
    log = logging.getLogger("forerun.serve")
    handler = logging.StreamHandler(FullDisk())
    monkeypatch.setattr(logging, "raiseExceptions", False)  # as in production
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        assert server.post("/v1/completions", ASK).status_code == 200
    finally:
        log.removeHandler(handler)


def test_a_clock_that_jumps_changes_no_deadline(server, monkeypatch):
    import time

    jump = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(time, "time", lambda: float(next(jump)))
    body = {**ASK, "forerun": {"deadline": 30}}
    r = server.post("/v1/completions", body)
    assert r.status_code == 200 and r.json()["forerun"]["finish_reasons"] != ["deadline"]


@pytest.mark.parametrize(
    "method, path, content, status",
    [
        ("GET", "/nowhere", b"", 404),
        ("GET", "/v1/completions", b"", 405),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[" * 5000, 400),
        ("POST", "/v1/completions", b"1" * 5000, 400),
        ("POST", "/v1/completions", b"\xff\xfe", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/completions", b"null", 400),
        ("POST", "/v1/completions", b'{"prompt": "\\ud800"}', 400),
        ("POST", "/v1/completions", b'{"model": "\\ud800", "prompt": "a"}', 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "\\ud800": 1}', 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "temperature": NaN}', 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "seed": 1e400}', 400),
    ],
)
def test_whatever_is_sent_an_error_has_openais_shape(server, method, path, content, status):
    headers = {"content-type": "application/json"}
    r = server.request(method, path, content=content, headers=headers)
    assert r.status_code == status
    assert r.json()["error"].keys() == {"message", "type", "param", "code"}


def test_tokens_there_and_back(server):
    told = server.post("/tokenize", {"model": "chat", "prompt": "héllo"}).json()
    assert told["count"] == len(told["tokens"]) == 6 and told["max_model_len"] == 160
    back = server.post("/detokenize", {"model": "chat", "tokens": told["tokens"]}).json()
    assert back["prompt"] == "héllo"
    chat = [{"role": "user", "content": "hi"}]
    told = server.post("/tokenize", {"model": "chat", "messages": chat}).json()
    assert server.post("/detokenize", {"model": "chat", "tokens": told["tokens"]}).json() == {
        "prompt": "<u>hi<a>"
    }
    assert server.post("/detokenize", {"model": "chat", "tokens": [9999]}).status_code == 400


def test_metrics_count_what_was_decoded():
    with in_process() as server:
        body = {**ASK, "prompt": "abab", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
        r = server.post("/v1/completions", {**body, "forerun": {"method": "lookup"}}).json()
        text = server.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = 'model_name="plain"'
    assert float(values[f"forerun:generation_tokens_total{{{label}}}"]) == 9
    assert float(values[f"forerun:prompt_tokens_total{{{label}}}"]) == 4
    drafted = values[f"forerun:spec_decode_num_draft_tokens_total{{{label}}}"]
    accepted = values[f"forerun:spec_decode_num_accepted_tokens_total{{{label}}}"]
    assert float(drafted) == r["forerun"]["drafted_tokens"] > 0
    assert float(accepted) == r["forerun"]["accepted_tokens"]
    places = [float(v) for k, v in values.items() if "per_pos_total" in k]
    assert sum(places) == float(accepted)
    assert float(values[f'forerun:request_success_total{{finished_reason="length",{label}}}']) == 1


def test_further_routers_can_ask_the_same_models():
    """What a page in front of the server needs: models by name, text and trace events in order."""
    from fastapi import APIRouter, Request

    from forerun.serve.server import server_of
    from forerun.serve.streams import Ask, Text, Traced

    router = APIRouter()

    @router.get("/extra")
    async def extra(request: Request) -> list[str]:
        server = server_of(request)
        submit = lambda m: m.submit("ab", ignore_eos=True, streams=True, traces=True)
        decoding = await server.decodings.start(Ask(submit, "plain"))
        kinds = []
        try:
            async for item in decoding:
                assert isinstance(item, Text | Traced)
                kinds.append(type(item).__name__)
        finally:
            decoding.close()
        return kinds

    server = local_server()
    with in_process(server) as caller:
        caller.app = create_app(Settings(), [router], server)
        kinds = caller.get("/extra").json()
    assert kinds[0] == "Traced" and "Text" in kinds


def test_settings_that_mean_nothing_are_refused():
    from forerun.errors import BadOption

    for wrong in ({"queue": 0}, {"grace": -1}, {"memory_gib": 0}, {"api_keys": [" "]}):
        with pytest.raises(BadOption):
            Settings(**wrong)


def test_telemetry_is_fastapis_own_and_off_unless_asked():
    with in_process(telemetry=True) as server:
        assert server.get("/health").status_code == 200
