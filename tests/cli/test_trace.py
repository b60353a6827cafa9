"""`forerun trace`: what is shown of a trace, whoever wrote it and wherever it is read."""

import json

import pytest
from rich.console import Console

from forerun.cli import trace
from forerun.errors import BadOption
from tests.helpers import run

LINE = {
    "forward": 1,
    "reason": "accepted",
    "tokens": [1, 2],
    "texts": ["a", " b"],
    "rejected": [3],
    "rejected_texts": ["c"],
}


def written(folder, *lines):
    file = folder / "t.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_what_a_file_says_cannot_drive_the_terminal(tmp_path):
    evil = "\x1b]0;title\x07\x1b[2J\r\x9b31m\u202e\ud800"
    texts = {"texts": [evil, "b"], "rejected_texts": [evil], "reason": "rea\x1b[31mson"}
    shown = run("trace", written(tmp_path, {**LINE, **texts}))
    assert shown.exit_code == 0
    assert all(each.isprintable() or each == "\n" for each in shown.stdout)
    assert "\\x1b[2J" in shown.stdout and "\\u202e" in shown.stdout


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 3},
        {"tokens": [{}]},
        {"texts": "ab"},
        {"texts": ["a"]},
        {"texts": [1, 2]},
        {"rejected": None},
        {"rejected": 7},
        {"rejected_texts": [None]},
        {"reason": ["x"]},
        {"forward": "1"},
        {"forward": float("nan")},
        {"forward": True},
        {"request": [1]},
        {"request": "a"},
    ],
)
def test_a_line_that_is_none_is_named_by_its_number(tmp_path, change):
    file = written(tmp_path, LINE, {**LINE, **change})
    said = run("trace", file).exception
    assert isinstance(said, BadOption) and "t.jsonl:2 is not a line of a trace" in str(said)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[1]\n", b"[" * 100_000, b"null", b"\n"])
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    assert isinstance(run("trace", tmp_path / "t").exception, BadOption)
    assert isinstance(run("trace", tmp_path).exception, BadOption)


def shown_by(console):
    commits = [trace.read_commit(LINE), trace.read_commit({**LINE, "reason": "resampled"})]
    with console.capture() as shown:
        trace.show(commits, console)
    return shown.get()


@pytest.mark.parametrize(
    "settings",
    [
        {"no_color": True, "color_system": "truecolor", "force_terminal": True},  # NO_COLOR
        {"color_system": None, "force_terminal": True},  # a dumb terminal
        {},  # a file or a pipe
    ],
)
def test_without_colours_the_reasons_are_written_out(settings):
    shown = shown_by(Console(width=100, **settings))
    assert "accepted[a·b]  resampled[a·b]  rejected[cc]" in shown


def test_with_colours_they_are_not():
    shown = shown_by(
        Console(width=100, color_system="standard", force_terminal=True, no_color=False)
    )
    assert "accepted[" not in shown and "\x1b[32m" in shown


def test_a_picture_has_colours_wherever_it_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    svg = tmp_path / "t.svg"
    run("trace", written(tmp_path, LINE), "--svg", svg)
    assert "accepted[" not in svg.read_text() and "line-through" in svg.read_text()


def test_lines_that_are_no_commits_are_passed_over(tmp_path):
    others = [{"kind": "start", "tokens": [None]}, {"kind": "forward"}, {"kind": "end"}]
    alone = run("trace", written(tmp_path, LINE), "--json").stdout
    assert run("trace", written(tmp_path, others[0], LINE, *others[1:]), "--json").stdout == alone
    assert isinstance(run("trace", written(tmp_path, *others)).exception, BadOption)


def test_what_generate_wrote_becomes_one_page(tmp_path):
    file = tmp_path / "t.jsonl"
    page = tmp_path / "t.html"
    run("generate", "def f(", "--method", "lookup", "--max-tokens", "4", "--trace", file)
    kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
    assert kinds[0] == "start" and kinds[-1] == "end" and "forward" in kinds
    assert run("trace", file, "--html", page).exit_code == 0
    text = page.read_text()
    assert "http://www.w3.org" in text  # a name, and the only address in it
    assert text.count("://") == 1
    inside = text.split('id="trace">')[1].split("</script>")[0]
    assert [json.loads(line)["kind"] for line in inside.splitlines()] == kinds
