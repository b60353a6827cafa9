"""Clients as they are, against a server as it is: `make conformance` runs this, and CI does not.

It starts `forerun serve` with the embedded models, and lets programs of other people talk to it:
lm-eval, langchain-openai, schemathesis, trustedrouter-provider-check and guidellm, each from an
environment of its own (CLIENTS). What is not installed there is skipped.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from forerun import zoo
from tests.helpers import ROOT
from tests.serve.servers import free_port
from tests.serve.test_process import start

CLIENTS = Path(os.environ.get("CLIENTS", ROOT / ".venv-clients")) / "bin"


@pytest.fixture(scope="module")
def port():
    found = free_port()
    flags = ["zoo:any-subset", "--chat-template", "plain", "--deadline", 60]
    process = start(found, *flags, log=os.devnull)  # a server whose pipe is full stands still
    yield found
    process.terminate()
    process.wait(60)


def client_program(name):
    program = CLIENTS / name
    if not program.exists():
        pytest.skip(f"{name} is not in {CLIENTS}")
    return str(program)


def run(*words, seconds=600, **variables):
    environment = {**os.environ, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", **variables}
    environment.pop("PYTHONPATH", None)
    words = list(map(str, words))
    return subprocess.run(words, capture_output=True, text=True, timeout=seconds, env=environment)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    zoo.tokenizer().save_pretrained(folder)
    return folder


TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: {kind}
test_split: test
doc_to_text: "{{{{q}}}}"
{rest}
"""
PICK = """doc_to_choice: choices
doc_to_target: a
target_delimiter: ""
metric_list: [{metric: acc}]"""
WRITE = """doc_to_target: a
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Two tasks of lm-eval that need no download."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    lines = [{"q": f"import os\nimport s{i}", "choices": ["ys", "\n\n"], "a": 0} for i in range(6)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, kind, rest in (("pick", "multiple_choice", PICK), ("write", "generate_until", WRITE)):
        told = TASK.format(name=f"forerun_{name}", data=data, kind=kind, rest=rest)
        (folder / f"{name}.yaml").write_text(told)
    return folder


def lm_eval(port, tasks, kind, path, names, **arguments):
    told = {"model": "zoo:ar", "base_url": f"http://127.0.0.1:{port}{path}", "max_retries": 1}
    words = ",".join(f"{name}={value}" for name, value in {**told, **arguments}.items())
    flags = ["--apply_chat_template"] if "chat" in kind else []
    return run(
        *(client_program("lm-eval"), "run", "--model", kind, "--model_args", words),
        *("--tasks", names, "--include_path", tasks, *flags),
    )


def test_lm_eval_scores_and_generates(port, tasks, tokenizer):
    kind = "local-completions"
    both = "forerun_pick,forerun_write"
    done = lm_eval(port, tasks, kind, "/v1/completions", both, tokenizer=tokenizer)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|forerun_pick" in done.stdout and "acc" in done.stdout


def test_lm_eval_chats(port, tasks):
    kind = "local-chat-completions"
    done = lm_eval(port, tasks, kind, "/v1/chat/completions", "forerun_write")
    assert done.returncode == 0 and "|forerun_write" in done.stdout, done.stderr[-2000:]


LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI, OpenAI
same = dict(base_url=sys.argv[1], api_key="none", model="zoo:ar", temperature=0, max_tokens=8)
chat = ChatOpenAI(**same)
answer = chat.invoke("import os")
assert answer.content == "".join(chunk.content for chunk in chat.stream("import os"))
assert answer.usage_metadata["output_tokens"] == 8
assert answer.response_metadata["finish_reason"] == "length"
text = OpenAI(**same)
assert text.invoke("import os") == "".join(text.stream("import os"))
assert len(text.generate(["a", "b"]).generations) == 2
"""


def test_langchain_chats_streams_and_completes(port):
    python = client_program("python")
    done = run(python, "-c", LANGCHAIN, f"http://127.0.0.1:{port}/v1")
    if "No module named 'langchain_openai'" in done.stderr:
        pytest.skip("langchain-openai is not installed")
    assert done.returncode == 0, done.stderr[-2000:]


def test_schemathesis_finds_no_failure_of_the_server(port):
    done = run(
        *(client_program("schemathesis"), "run", f"http://127.0.0.1:{port}/openapi.json"),
        *("--max-examples", 12, "-c", "not_a_server_error", "--request-timeout", 60, "--seed", 1),
        *("--phases", "fuzzing"),
        seconds=900,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_gateways_own_check_of_providers_passes(port):
    program = client_program("trustedrouter-provider-check")
    done = run(program, "--base-url", f"http://127.0.0.1:{port}/v1", "--model", "zoo:ar")
    failed = set(re.findall(r"^\d\s+FAIL\s+(\S+)", done.stdout, re.M))
    assert "Summary:" in done.stdout, done.stderr[-2000:]
    assert failed <= {"chat.pong"}, done.stdout[-4000:]  # a model of code says no "pong"


def test_guidellm_can_load_it(port, tokenizer, tmp_path):
    done = run(
        *(client_program("guidellm"), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target=http://127.0.0.1:{port},model=zoo:ar"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", "kind=max_duration,seconds=12"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=16"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert (tmp_path / "report.json").exists()
