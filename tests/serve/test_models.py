"""Models are loaded when asked for, let go of when memory is short, and loaded anew when an engine
fails."""

import asyncio

import httpx
import pytest

from forerun.errors import BadCheckpoint, BadOption
from forerun.serve.errors import ApiError
from forerun.serve.models import MOST_RESTARTS, Models, bytes_of
from forerun.serve.settings import GIBIBYTE, Settings
from tests.serve.servers import in_process, load, local_server

ASK = {"model": "plain", "prompt": "ab", "max_tokens": 2}


def models(loader=load, **settings):
    return Models(Settings(lanes=2, **settings), loader)


def test_without_names_the_embedded_models_are_served_and_the_causal_one_first():
    found = models()
    assert found.ids[0] == "zoo:ar" and "zoo:any-subset" in found.ids
    assert found.served(None).id == "zoo:ar"
    told = found.served("zoo:masked").describe()
    assert told["max_model_len"] == 1024 and told["forerun"]["method"] == "stepwise"
    assert told["forerun"]["loaded"] is False
    assert found.able_to_fill() == ["zoo:any-subset", "zoo:masked"]


def test_a_model_is_served_under_the_name_it_was_given_and_no_path_is_told():
    with in_process(models=["mine=plain"]) as server:
        r = server.post("/v1/completions", {**ASK, "model": "mine"}).json()
        assert r["model"] == "mine" and r["forerun"]["reference"] == "ar on mine"
        assert server.post("/v1/completions", ASK).status_code == 404
    for names in (["a=plain", "a=chat"], ["=plain"]):
        with pytest.raises(BadOption, match="a name of its own"):
            models(models=names)


def test_a_model_is_loaded_once_however_many_ask():
    loads = []

    def counting(source, **settings):
        loads.append(source)
        return load(source, **settings)

    async def ask(found):
        return await asyncio.gather(*[found.loaded("plain") for _ in range(8)])

    found = models(counting, models=["plain"])
    pairs = asyncio.run(ask(found))
    assert loads == ["plain"] and len({id(model) for _, model in pairs}) == 1
    found.close()


def test_the_model_that_was_used_least_recently_goes_when_memory_is_short():
    size = bytes_of(load("plain", lanes=2)) / GIBIBYTE
    found = models(models=["plain", "a=plain", "b=plain"], memory_gib=2.5 * size)

    async def ask(*names):
        for name in names:
            await found.loaded(name)
        return [served.id for served in found if served.model is not None]

    assert asyncio.run(ask("plain", "a")) == ["plain", "a"]
    assert asyncio.run(ask("plain", "b")) == ["plain", "b"]
    found.served("plain").gate.inside = 1  # it is in use
    found.served("b").gate.inside = 1
    with pytest.raises(Exception, match="memory limit"):
        asyncio.run(ask("a"))
    found.close()


def test_a_model_that_does_not_load_is_told_without_its_path():
    def broken(source, **settings):
        raise BadCheckpoint("/home/somebody/weights is damaged")

    with in_process(local_server(broken)) as server:
        r = server.post("/v1/completions", ASK)
        assert r.status_code == 503 and "somebody" not in r.text
        assert server.get("/health").status_code == 200


def test_an_engine_that_fails_is_replaced_and_at_last_the_server_says_so():
    server = local_server()
    with in_process(server) as caller:
        for failures in range(1, MOST_RESTARTS + 2):
            assert caller.post("/v1/completions", ASK).status_code == 200
            engine = server.models.served("plain").model.engine

            def fail():
                raise RuntimeError("a broken kernel at /opt/secret")

            engine.step = fail
            r = caller.post("/v1/completions", ASK)
            assert r.status_code == 503 and "secret" not in r.text
            assert server.models.served("plain").restarts == failures
        health = caller.get("/health")
        assert health.status_code == 503 and "plain" in health.json()["reason"]
        assert caller.get("/ready").status_code == 503
        assert caller.post("/v1/completions", ASK).status_code == 503


def test_the_servers_method_holds_where_a_model_can_do_it():
    with in_process(method="lookup") as server:
        one = server.post("/v1/completions", ASK).json()
        other = server.post("/v1/completions", {**ASK, "model": "masked"}).json()
    assert one["forerun"]["method"] == "lookup" and other["forerun"]["method"] == "stepwise"


def test_an_unknown_model_is_not_found():
    with pytest.raises(ApiError) as missing:
        models(models=["plain"]).served("plane")
    assert missing.value.status == 404 and "'plain'" in missing.value.message


def test_requests_are_refused_while_the_server_ends():
    server = local_server()
    with in_process(server) as caller:
        assert caller.get("/ready").status_code == 200
        caller.portal.call(lambda: _drain(server))
        assert caller.get("/ready").status_code == 503
        r: httpx.Response = caller.post("/v1/completions", ASK)
        assert r.status_code == 503 and r.headers["retry-after"]
        assert r.json()["error"]["code"] == "shutting_down"


async def _drain(server):
    server.decodings.drain()


def test_the_servers_draft_is_loaded_once_and_its_path_is_told_to_nobody():
    loads = []

    def counting(source, **settings):
        loads.append(source)
        return load("plain" if source == "/home/me/draft" else source, **settings)

    served = local_server(counting, draft="/home/me/draft", method="speculative")
    with in_process(served) as server:
        body = {**ASK, "model": "chat", "max_tokens": 9}
        for _ in range(2):
            r = server.post("/v1/completions", body).json()
            assert r["forerun"]["draft_forwards"] > 0
        wrong = server.post("/v1/completions", {**body, "forerun": {"method": "specdiff"}})
        asked = {"method": "specdiff", "draft": "ngram"}
        refused = server.post("/v1/completions", {**body, "forerun": asked})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "draft"
    assert loads == ["chat", "/home/me/draft"]
    assert wrong.status_code == 400 and "/home" not in wrong.text


def test_a_process_whose_engine_is_beyond_help_ends_with_a_reason():
    import threading

    import uvicorn

    from forerun.serve.app import create_app
    from forerun.serve.run import FAILED, Process
    from tests.serve.servers import free_port

    server = local_server()
    config = uvicorn.Config(create_app(server.settings, server=server), port=free_port())
    process = Process(config, server)
    thread = threading.Thread(target=process.run, daemon=True)
    thread.start()
    server.models.failure = "the engine is gone"
    thread.join(20)
    assert not thread.is_alive() and process.exit_status == FAILED
