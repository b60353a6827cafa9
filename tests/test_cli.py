"""The command line as a user meets it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from forerun.checkpoints import tiny
from forerun.cli import app, main

runner = CliRunner()


def run(*words, **kwargs):
    return runner.invoke(app, list(map(str, words)), **kwargs)


def test_generate_prints_the_text():
    a, b = tiny.tokenizer()("AB").input_ids
    words = ["--max-tokens", 6, "--temperature", 1, "--allowed-tokens", a, "--allowed-tokens", b]
    result = run("generate", "ABAB", "--model", "tiny", *words)
    assert result.exit_code == 0 and set(result.stdout.strip()) <= {"A", "B"}


def test_generate_json_is_one_object_per_result():
    result = run("generate", "A", "B", "--model", "tiny", "--max-tokens", 3, "--json", "--ignore-eos")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) == 2
    assert lines[0].keys() >= {"text", "token_ids", "finish_reason", "method", "model", "guarantee", "reference", "stats"}
    assert lines[0]["stats"].keys() >= {
        "tokens",
        "forwards",
        "draft_forwards",
        "tokens_per_forward",
        "acceptance_length",
        "seconds",
    }


def test_options_of_the_method_are_flags():
    result = run("generate", "ABABAB", "--model", "tiny", "--method", "lookup", "--k", 2, "--ngram=2", "--max-tokens", 5, "--json")
    assert json.loads(result.stdout)["method"] == "lookup"


def test_flags_reach_the_sampling_parameters():
    result = run("generate", "x", "--model", "tiny", "--max-tokens", 4, "--logit-bias", "65=99", "--json")
    assert json.loads(result.stdout)["token_ids"] == [65] * 4
    result = run("generate", "x", "--model", "tiny", "--max-tokens", 4, "--logit-bias", "65=99", "--stop-token-ids", 65, "--json")
    assert json.loads(result.stdout)["token_ids"] == [65]


def test_prompts_come_from_files_and_standard_input(tmp_path):
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "three"}\n')
    assert len(run("generate", "--prompts", tmp_path / "p.txt", "-m", "tiny", "--max-tokens", 2, "--json").stdout.splitlines()) == 2
    assert (
        len(run("generate", "--prompts", tmp_path / "p.jsonl", "-m", "tiny", "--max-tokens", 2, "--json").stdout.splitlines()) == 1
    )
    assert run("generate", "-", "-m", "tiny", "--max-tokens", 2, "--json", input="four").exit_code == 0


def test_a_trace_is_written_and_shown(tmp_path):
    file, svg = tmp_path / "t.jsonl", tmp_path / "t.svg"
    run("generate", "ABABAB", "-m", "tiny", "--method", "lookup", "--max-tokens", 12, "--trace", file, "--ignore-eos")
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(e.keys() >= {"forward", "reason", "positions", "tokens", "drafted", "rejected"} for e in events)
    assert sum(len(e["tokens"]) for e in events) == 12
    shown = run("trace", file, "--svg", svg)
    assert shown.exit_code == 0 and "12 tokens" in shown.stdout and svg.read_text().startswith("<svg")
    assert json.loads(run("trace", file, "--json").stdout)["tokens"] == 12


def test_methods_and_models_and_doctor_speak_json():
    names = {row["method"] for row in json.loads(run("methods", "--json").stdout)}
    assert names >= {"ar", "speculative", "lookup"}
    assert json.loads(run("methods", "lookup", "--json").stdout)[0]["options"].keys() == {"k", "ngram", "adapt"}
    assert any(row["model"] == "smollm" for row in json.loads(run("models", "--json").stdout))
    report = json.loads(run("doctor", "--json", "--model", "tiny").stdout)
    assert report["versions"]["torch"] and report["model"]["lanes that fit"] > 0


@pytest.mark.parametrize("command", ["methods", "models", "doctor"])
def test_lists_are_readable(command):
    assert run(command).exit_code == 0


def test_certify_enumerates_without_a_model():
    result = run("certify", "--method", "lookup", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["verdict"] == "holds"


def test_certify_tests_on_a_model_and_prints_its_power():
    result = run("certify", "--method", "speculative", "--model", "tiny", "--draft", "tiny:llama:1", "--json")
    verdict = json.loads(result.stdout)
    assert result.exit_code == 0 and verdict["verdict"] == "holds" and min(verdict["power"].values()) >= 0.95
    shown = run("certify", "--method", "speculative", "--model", "tiny", "--draft", "tiny:llama:1", "--temperature", 0)
    assert shown.exit_code == 0 and "holds" in shown.stdout


@pytest.mark.parametrize(
    "words, said",
    [
        (["generate", "x", "--method", "nope"], "unknown"),
        (["generate", "x", "--tempersture", "1"], "temperature"),
        (["generate", "x", "--model", "/no/such/place"], "no directory"),
        (["generate", "x", "--model", "tiny", "--temperature", "nan"], "temperature=nan"),
        (["generate", "x", "--model", "tiny", "--max-tokens", "0"], "max_tokens=0"),
        (["generate", "--model", "tiny"], "no prompt"),
        (["generate", "", "--model", "tiny"], "empty"),
        (["generate", "x", "--prompts", "/no/file"], "not a file"),
        (["generate", "x", "--model", "tiny", "--stop", ""], "stop"),
        (["generate", "x", "--model", "tiny", "--chat"], "chat template"),
        (["generate", "x", "--model", "tiny", "--logit-bias", "5"], "TOKEN=BIAS"),
        (["generate", "x", "--model", "tiny", "--method", "speculative"], "draft="),
        (["certify", "--method", "nope"], "unknown"),
        (["certify", "--method", "ar", "--model", "tiny", "--alpha", "2"], "alpha"),
        (["trace", "/no/file"], "does not exist"),
        (["methods", "nope"], "unknown"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["forerun", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "error:" in err and said in err and "Traceback" not in err


def test_a_wrong_option_is_refused_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr("forerun.cli.generate.load", lambda *a, **k: pytest.fail("loaded"))
    monkeypatch.setattr(sys, "argv", ["forerun", "generate", "x", "--model", "tiny", "--top-p", "7"])
    with pytest.raises(SystemExit):
        main()
    assert "top_p=7" in capsys.readouterr().err


def test_in_a_batch_the_good_ones_are_printed_and_the_exit_code_tells():
    result = run("generate", "good", "", "--model", "tiny", "--max-tokens", 3, "--json", "--ignore-eos")
    good, bad = (json.loads(line) for line in result.stdout.splitlines())
    assert result.exit_code == 1 and len(good["token_ids"]) == 3 and "empty" in bad["error"]


def test_ctrl_c_prints_what_was_decoded_so_far():
    words = ["generate", "x", "--model", "tiny", "--max-tokens", "500", "--ignore-eos", "--json"]
    slow = "\n".join(
        [
            "import time, forerun.backbones.lean as b",
            "forward = b.LeanBackbone.forward",
            "b.LeanBackbone.forward = lambda *a: (time.sleep(0.05), forward(*a))[1]",
            "from forerun.cli import main",
            "print('ready', flush=True)",
            "main()",
        ]
    )
    process = subprocess.Popen([sys.executable, "-c", slow, *words], stdout=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stdout.readline() == "ready\n"
    time.sleep(6)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    result = json.loads(out)
    assert process.returncode == 130 and result["finish_reason"] == "cancelled" and 0 < len(result["token_ids"]) < 500


def test_help_does_not_wait_for_torch():
    script = "import sys; from typer.testing import CliRunner; from forerun.cli import app; import forerun; " \
             "r = CliRunner().invoke(app, ['--help']); assert r.exit_code == 0; sys.exit('torch' in sys.modules)"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
