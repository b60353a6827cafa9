"""What the page asks over HTTP: who may ask, what comes back, and what never does."""

import base64
import hashlib
import json
import re
from functools import cache

import pytest
from fastapi.testclient import TestClient

from forerun.page import assets
from forerun.page.routes import page_routers
from forerun.serve.app import create_app
from forerun.serve.settings import Settings

RUN = {"model": "zoo:ar", "prompt": "def f(x):", "max_tokens": 4, "temperature": 0}


@cache
def client(**settings):
    app = create_app(Settings(lanes=2, **settings), page_routers())
    return TestClient(app, raise_server_exceptions=False)


def lines_of(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert end == "[DONE]"
    return [json.loads(event) for event in events]


def run(*runs, **settings):
    return client(**settings).post("/page/run", json={"runs": list(runs)})


def message(response):
    return response.json()["error"]["message"]


def test_every_file_forbids_what_it_does_not_need():
    for name in ["", *(f"page/{name}" for name in assets.names() if name != "replay.html")]:
        found = client().get(f"/{name}")
        assert found.status_code == 200, name
        policy = found.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy and "http" not in policy
        assert found.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["x.js", "..%2froutes.py", "%2e%2e/routes.py", "dom.js%00", ".."])
def test_only_the_pages_own_files_are_given(name):
    found = client().get(f"/page/{name}")
    assert found.status_code == 404 or "Forerun</title>" in found.text


def test_the_page_asks_for_nothing_elsewhere():
    for name in assets.names():
        text = assets.read(name).content.decode()
        addresses = set(re.findall(r"[a-z]+://[^\s'\"]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        assert "innerHTML" not in text and "eval(" not in text, name


def test_the_whole_page_is_small():
    assert sum(len(assets.read(name).content) for name in assets.names()) < 150_000


def test_a_stream_has_the_lines_of_a_trace():
    lines = lines_of(run(*({**RUN, "forerun": {"method": name}} for name in ("ar", "lookup"))))
    first = [line for line in lines if line["request"] == 0]
    assert [line["kind"] for line in first] == ["start", *["forward", "commit"] * 4, "end"]
    second = [line for line in lines if line["request"] == 1]
    assert second[0]["method"] == "lookup" and second[-1]["text"] == first[-1]["text"]


def test_completions_are_told_best_first():
    text = {"model": "zoo:any-subset", "text": "x = <|fill:2-3|>\n", "temperature": 1, "n": 2}
    lines = lines_of(run(text))
    assert lines[-1]["kind"] == "fills"
    alternatives = lines[-1]["alternatives"]
    assert len(alternatives) == 2
    assert all(one["given"] == ["x = ", "\n"] and len(one["fills"]) == 1 for one in alternatives)
    requests = {line["request"] for line in lines if line["kind"] == "start"}
    assert {one["request"] for one in alternatives} <= requests


@pytest.mark.parametrize(
    "change, words",
    [
        ({"prompt": None}, "one of prompt, messages and text"),
        ({"text": "x <|fill:1|>"}, "one of prompt, messages and text"),
        ({"model": "zoo:nothing"}, "zoo:nothing"),
        ({"forerun": {"method": "jacobi", "options": {"block": 0}}}, "block=0"),
        ({"forerun": {"method": "jacobi", "options": {"record": True}}}, "record"),
        ({"forerun": {"method": "speculative", "draft": "/etc"}}, "draft"),
        ({"forerun": {"method": "ssd"}}, "method='ssd'"),
        ({"other": 1}, "other"),
        ({"n": 1000}, "n times prompts"),
    ],
)
def test_a_mistake_is_told_in_our_words_and_starts_nothing(change, words):
    answer = run(RUN, {**RUN, **change})
    assert 400 <= answer.status_code < 500 and words in message(answer)
    decodings = client().app.state.server.decodings
    assert not decodings.running


def test_five_are_too_many_and_none_too_few():
    assert run(*[RUN] * 5).status_code == 400
    assert run().status_code == 400


def test_with_a_key_only_the_files_are_open():
    guarded = client(api_keys=("secret",))
    assert guarded.get("/").status_code == 200
    assert guarded.get("/page/app.js").status_code == 200
    assert guarded.get("/page/about").status_code == 401
    for path in ("run", "compare", "certify", "load"):
        assert guarded.post(f"/page/{path}", json={}).status_code in (400, 401)
    told = guarded.get("/page/about", headers={"authorization": "Bearer secret"})
    assert told.status_code == 200


def test_what_there_is_is_told_before_anything_is_loaded():
    told = client(models=("zoo:masked", "zoo:ar")).get("/page/about").json()
    masked, causal = told["models"]
    assert masked["family"] == "masked" and masked["infills"] and not masked["loaded"]
    assert "ssd" in masked["methods"] and "jacobi" in causal["methods"]
    assert told["methods"]["multiblock"]["options"]["block"]["default"] == 16


def test_a_comparison_tells_its_progress_and_its_rows():
    asked = {"models": ["zoo:ar"], "methods": ["ar", "lookup"], "prompts": ["x ="], "max_tokens": 4}
    lines = lines_of(client().post("/page/compare", json=asked))
    assert [line["done"] for line in lines if line["kind"] == "progress"] == [1, 2, 3, 4]
    assert [row["method"] for row in lines[-1]["rows"]] == ["ar", "lookup"]
    assert not client().app.state.server.models.served("zoo:ar").busy


def test_a_study_that_cannot_be_is_an_error_and_leaves_nothing():
    asked = {"models": ["zoo:ar"], "methods": ["ssd"]}
    assert "method='ssd'" in message(client().post("/page/compare", json=asked))
    wrong = {"method": "speculative", "model": "zoo:ar", "draft": "/etc/passwd"}
    assert "draft" in message(client().post("/page/certify", json=wrong))
    lines = lines_of(client().post("/page/certify", json={"method": "threshold"}))
    assert lines[-1]["kind"] in ("error", "certificate")
    assert not client().app.state.server.models.served("zoo:ar").busy


def test_a_replay_runs_only_its_own_script():
    evil = {"kind": "end", "text": "</script><script>alert(1)</script><!--"}
    text = assets.replay_html([evil], "<b>title</b>")
    policy = re.search(r'Policy" content="([^"]*)"', text)[1]
    script = re.search(r'<script type="module">(.*?)</script>', text, re.DOTALL)[1]
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    for source in (script, style):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe" not in policy and policy.startswith("default-src 'none'")
    assert text.count("<script") - script.count("<script") == 2
    assert "<b>" not in text
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)


def test_names_of_bundled_modules_do_not_meet():
    defined = re.findall(
        r"^(?:async )?(?:function|class|const|let) (\w+)",
        assets.bundle(assets.REPLAY),
        re.MULTILINE,
    )
    assert len(defined) == len(set(defined)) > 20
