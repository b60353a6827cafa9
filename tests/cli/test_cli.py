"""The command line as a user meets it."""

import json
import signal
import subprocess
import sys

import pytest

from forerun.checkpoints import tiny
from forerun.cli import main
from forerun.cli.common import ResultFile, printable
from tests.helpers import hears_ctrl_c, run


def test_generate_prints_the_text():
    a, b = tiny.tokenizer()("AB").input_ids
    words = ["--max-tokens", 6, "--temperature", 1, "--allowed-tokens", a, "--allowed-tokens", b]
    result = run("generate", "ABAB", "--model", "tiny", *words)
    assert result.exit_code == 0 and set(result.stdout.strip()) <= {"A", "B"}


def test_generate_json_is_one_object_per_result():
    result = run(
        "generate", "A", "B", "--model", "tiny", "--max-tokens", 3, "--json", "--ignore-eos"
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) == 2
    assert lines[0].keys() >= {
        "text",
        "token_ids",
        "finish_reason",
        "method",
        "model",
        "guarantee",
        "reference",
        "stats",
    }
    assert lines[0]["stats"].keys() >= {
        "tokens",
        "forwards",
        "draft_forwards",
        "tokens_per_forward",
        "acceptance_length",
        "seconds",
    }


def test_options_of_the_method_are_flags():
    result = run(
        "generate",
        "ABABAB",
        "--model",
        "tiny",
        "--method",
        "lookup",
        "--k",
        2,
        "--ngram=2",
        "--max-tokens",
        5,
        "--json",
    )
    assert json.loads(result.stdout)["method"] == "lookup"


def test_flags_reach_the_sampling_parameters():
    result = run(
        "generate", "x", "--model", "tiny", "--max-tokens", 4, "--logit-bias", "65=99", "--json"
    )
    assert json.loads(result.stdout)["token_ids"] == [65] * 4
    result = run(
        "generate",
        "x",
        "--model",
        "tiny",
        "--max-tokens",
        4,
        "--logit-bias",
        "65=99",
        "--stop-token-ids",
        65,
        "--json",
    )
    assert json.loads(result.stdout)["token_ids"] == [65]


def test_prompts_come_from_files_and_standard_input(tmp_path):
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "three"}\n')
    assert (
        len(
            run(
                "generate",
                "--prompts",
                tmp_path / "p.txt",
                "-m",
                "tiny",
                "--max-tokens",
                2,
                "--json",
            ).stdout.splitlines()
        )
        == 2
    )
    assert (
        len(
            run(
                "generate",
                "--prompts",
                tmp_path / "p.jsonl",
                "-m",
                "tiny",
                "--max-tokens",
                2,
                "--json",
            ).stdout.splitlines()
        )
        == 1
    )
    assert (
        run("generate", "-", "-m", "tiny", "--max-tokens", 2, "--json", input="four").exit_code == 0
    )


def test_a_prompt_file_may_hold_token_ids_and_odd_line_ends(tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '\ufeff{"prompt": [1, 2]}\n\n{"prompt": "a\u2028b"}\r\n', encoding="utf-8"
    )
    lines = run(
        "generate", "--prompts", tmp_path / "p.jsonl", "-m", "tiny", "--max-tokens", 2, "--json"
    ).stdout.splitlines()
    assert [json.loads(line)["stats"]["prompt_tokens"] for line in lines] == [2, 5]


def test_a_broken_line_is_named_by_its_number(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n\n\n{"messages": "hello"}\n')
    assert "p.jsonl:4" in str(
        run("generate", "--prompts", tmp_path / "p.jsonl", "-m", "tiny").exception
    )


def test_a_trace_of_several_requests_counts_all_forwards(tmp_path):
    file = tmp_path / "t.jsonl"
    run(
        "generate",
        "A",
        "B",
        "--method",
        "ar",
        "-m",
        "tiny",
        "--max-tokens",
        6,
        "--trace",
        file,
        "--ignore-eos",
        "--json",
    )
    assert json.loads(run("trace", file, "--json").stdout) == {
        "tokens": 12,
        "forwards": 12,
        "reasons": {"sampled": 12},
        "rejected": 0,
    }


def test_a_trace_is_written_and_shown(tmp_path):
    file, svg = tmp_path / "t.jsonl", tmp_path / "t.svg"
    run(
        "generate",
        "ABABAB",
        "-m",
        "tiny",
        "--method",
        "lookup",
        "--max-tokens",
        12,
        "--trace",
        file,
        "--ignore-eos",
    )
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    events = [line for line in lines if line["kind"] == "commit"]
    assert all(
        e.keys() >= {"forward", "reason", "positions", "tokens", "drafted", "rejected"}
        for e in events
    )
    assert sum(len(e["tokens"]) for e in events) == 12
    shown = run("trace", file, "--svg", svg)
    assert (
        shown.exit_code == 0 and "12 tokens" in shown.stdout and svg.read_text().startswith("<svg")
    )
    assert json.loads(run("trace", file, "--json").stdout)["tokens"] == 12


def test_methods_and_models_and_doctor_speak_json():
    names = {row["method"] for row in json.loads(run("methods", "--json").stdout)}
    assert names >= {"ar", "speculative", "lookup"}
    assert json.loads(run("methods", "lookup", "--json").stdout)[0]["options"].keys() == {
        "k",
        "ngram",
        "adapt",
    }
    models = {row["model"] for row in json.loads(run("models", "--json").stdout)}
    assert models >= {"zoo:ar", "smollm", "smollm:any-subset", "smollm:drafter"}
    report = json.loads(run("doctor", "--json", "--model", "tiny").stdout)
    assert report["versions"]["torch"] and report["model"]["lanes that fit"] > 0


def test_the_zoo_is_listed_and_its_cards_are_shown():
    assert {row["model"] for row in json.loads(run("zoo", "show", "--json").stdout)} >= {
        "zoo:ar",
        "zoo:drafter",
    }
    assert "Held-out loss" in run("zoo", "show", "ar").stdout


def test_a_model_of_the_zoo_can_be_trained_again(tmp_path, monkeypatch):
    from forerun import zoo

    shape = dict(
        model_type="llama",
        vocab_size=4096,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
    )
    shape |= dict(num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
    recipe = json.dumps(
        dict(objective="ar", steps=2, batch=4, context=16, validate_every=1, model=shape)
    )
    (tmp_path / "mini.yaml").write_text(recipe)
    monkeypatch.setattr(zoo, "recipe", lambda name: tmp_path / "mini.yaml")
    code = tmp_path / "code"
    code.mkdir()
    for i in range(150):
        (code / f"{i}.py").write_text(f"value_{i} = {i}\nprint(value_{i} + {i})\n" * 3)
    result = run("zoo", "train", "mini", "--data", code, "--out", tmp_path / "run" / "mini")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run" / "mini" / "mini.safetensors").exists() and (
        tmp_path / "run" / "mini" / "curve.csv"
    ).exists()


@pytest.mark.parametrize("command", ["methods", "models", "doctor"])
def test_lists_are_readable(command):
    assert run(command).exit_code == 0


def test_certify_enumerates_without_a_model():
    result = run("certify", "--method", "lookup", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["verdict"] == "holds"


def test_certify_of_a_cache_says_what_holds_and_what_does_not():
    dual = ("certify", "--method", "ssd", "--cache", "dual")
    enumerated = run(*dual)
    assert enumerated.exit_code == 0 and "holds" in enumerated.stdout
    for words in ("identical to stepwise under the same cache", "approximate to the model"):
        assert words in " ".join(enumerated.stdout.split())
    on_a_model = run(*dual, "--model", "tiny:masked", "--temperature", "0", "--json")
    found = json.loads(on_a_model.stdout)
    assert found["verdict"] == "holds"
    assert "identical to stepwise under the same cache" in found["reference"]


def test_certify_tests_on_a_model_and_prints_its_power():
    result = run(
        "certify", "--method", "speculative", "--model", "tiny", "--draft", "tiny:llama:1", "--json"
    )
    verdict = json.loads(result.stdout)
    assert (
        result.exit_code == 0
        and verdict["verdict"] == "holds"
        and min(verdict["power"].values()) >= 0.95
    )
    shown = run(
        "certify",
        "--method",
        "speculative",
        "--model",
        "tiny",
        "--draft",
        "tiny:llama:1",
        "--temperature",
        0,
    )
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
        (["certify", "--method", "lookup", "--k", "33"], "no table model is enumerated"),
        (["certify", "--method", "ar", "--model", "tiny", "--max-sequences", "0"], "max_sequences"),
        (
            ["generate", "x", "--model", "tiny", "--method", "lookup", "--k"],
            "--k needs a value, as in --k",
        ),
        (["generate", "x", "--model", "tiny", "--method", "lookup", "--adapt", "maybe"], "adapt"),
        (["generate", "x", "--model", "tiny", "--trace", "/no/such/folder/t"], "/no/such/folder/t"),
        (["generate", "x", "--model", "tiny", "--device", "mps"], "float64, which MPS does not"),
        (["generate", "-5 degrees", "--model", "tiny"], "generate -- '-5 degrees'"),
        (["generate", "-minus", "--model", "tiny"], "generate -- -minus"),
        (["generate", "--json", "-5", "--model", "tiny"], "behind --"),
        (["infill", "-<|fill:3|>"], "infill -- '-<|fill:3|>'"),
        (["infill", "<|fill:3|>", "--chat", "x"], "unknown"),
        (["generate", "x", "--model", "nowhere.gguf"], "no such .gguf file"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["forerun", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "error:" in err and said in err and "Traceback" not in err


def test_a_wrong_option_is_refused_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr("forerun.cli.decoding.load", lambda *a, **k: pytest.fail("loaded"))
    monkeypatch.setattr(
        sys, "argv", ["forerun", "generate", "x", "--model", "tiny", "--top-p", "7"]
    )
    with pytest.raises(SystemExit):
        main()
    assert "top_p=7" in capsys.readouterr().err


def test_in_a_batch_the_good_ones_are_printed_and_the_exit_code_tells():
    result = run(
        "generate", "good", "", "--model", "tiny", "--max-tokens", 3, "--json", "--ignore-eos"
    )
    good, bad = (json.loads(line) for line in result.stdout.splitlines())
    assert result.exit_code == 1 and len(good["token_ids"]) == 3 and "empty" in bad["error"]


def test_ctrl_c_prints_what_was_decoded_so_far():
    words = ["generate", "x", "--model", "tiny", "--max-tokens", "500", "--ignore-eos", "--json"]
    words += ["--method", "ar"]
    slow = "\n".join(
        [
            "import sys, time, forerun.backbones.lean as b",
            "forward = b.LeanBackbone.forward",
            "b.LeanBackbone.forward = lambda *a: (print('forward', file=sys.stderr, flush=True), "
            "time.sleep(0.05), forward(*a))[2]",
            "from forerun.cli import main",
            "main()",
        ]
    )
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(
        [sys.executable, "-c", slow, *words], **pipes, preexec_fn=hears_ctrl_c
    )
    seen = 0
    while seen < 5:
        seen += "forward" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    result = json.loads(out)
    assert (
        process.returncode == 130
        and result["finish_reason"] == "cancelled"
        and 0 < len(result["token_ids"]) < 500
    )


def test_requests_that_an_interrupt_kept_from_beginning_are_only_counted(monkeypatch):
    def interrupted(self, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("forerun.requests.jobs.Jobs.run", interrupted)
    words = ["--model", "tiny", "--method", "ar", "--lanes", 1, "--max-tokens", 400, "--ignore-eos"]
    result = run("generate", "a", "b", *words)
    assert result.exit_code == 130
    assert "of 2 requests had not begun" in result.output and " 2 " not in result.stdout


def test_help_does_not_wait_for_torch():
    script = "\n".join(
        [
            "import sys, forerun",
            "from typer.testing import CliRunner",
            "from forerun.cli import app",
            "assert CliRunner().invoke(app, ['--help']).exit_code == 0",
            "sys.exit('torch' in sys.modules)",
        ]
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_a_prompt_may_begin_with_a_dash_behind_two_of_them():
    result = run("generate", "-m", "tiny", "--max-tokens", 2, "--json", "--", "-5 degrees", "--k")
    sizes = [json.loads(line)["stats"]["prompt_tokens"] for line in result.stdout.splitlines()]
    assert sizes == [len("-5 degrees"), len("--k")]


def test_results_are_written_as_they_finish_with_index_and_prompt(tmp_path, monkeypatch):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    [end] = tiny.tokenizer()("E").input_ids
    given = ["long one", [end, 5], ""]
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in given))
    seen = []
    write = ResultFile._write
    monkeypatch.setattr(
        ResultFile,
        "_write",
        lambda self, index, results: (seen.append(index), write(self, index, results)),
    )
    result = run(
        "generate", "--prompts", prompts, "-m", "tiny", "--max-tokens", 5, "-o", out, "--ignore-eos"
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert result.stdout == "" and result.exit_code == 1, "one prompt is empty"
    assert [line["index"] for line in lines] == seen and sorted(seen) == [0, 1, 2]
    assert seen[0] == 2, "what cannot be decoded is known at once"
    by_index = {line["index"]: line for line in lines}
    assert by_index[0]["prompt"] == "long one" and by_index[1]["prompt"] == [end, 5]
    assert "error" in by_index[2] and len(by_index[0]["token_ids"]) == 5


def test_samples_and_fills_are_written_with_their_number(tmp_path):
    out = tmp_path / "out.jsonl"
    run("generate", "a", "-m", "tiny", "--n", 2, "--temperature", 1, "--max-tokens", 2, "-o", out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["index"], line["sample"]) for line in lines] == [(0, 0), (0, 1)]
    run("infill", "a<|fill:2|>b", "c<|fill:1|>", "-m", "tiny:any-subset", "-o", out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(line["prompt"] for line in lines) == ["a<|fill:2|>b", "c<|fill:1|>"]


def test_quiet_prints_results_and_errors_only():
    words = ["-m", "tiny", "--max-tokens", 2, "--quiet"]
    result = run("generate", "good", "", *words)
    assert (
        result.stdout and result.stderr.startswith("error: 2: ") and "tokens" not in result.stdout
    )
    assert run("generate", "good", *words).stderr == ""


def test_infill_takes_a_text_as_it_is():
    text = r'print("a\n<|fill:2|>\t")'
    result = run("infill", text, "-m", "tiny:any-subset", "--json")
    filled = json.loads(result.stdout)["text"]
    assert filled.startswith(r'print("a\n') and filled.endswith(r'\t")')


def test_what_an_error_quotes_cannot_drive_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["forerun", "trace", "no\x1b[2Jfile"])
    with pytest.raises(SystemExit):
        main()
    assert "\x1b[2J" not in capsys.readouterr().err


def test_only_what_controls_a_terminal_is_escaped():
    assert printable("a\x1b\x9b\u202e\ud800\n", keep="\n") == "a\\x1b\\x9b\\u202e\\ud800\n"
    assert printable("é 👩\u200d🔬 \ue0a0") == "é 👩\u200d🔬 \ue0a0"
