import random

from forerun.checkpoints import tiny
from forerun.requests.detokenizer import NEIGHBOURS, Detokenizer

TOKENIZER = tiny.tokenizer()


def decode(tokens):
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def write(text, stops=()):
    """All that was shown after each byte, and the writer."""
    writer, shown = Detokenizer(decode, stops), []
    for token in TOKENIZER(text).input_ids:
        writer.push(token)
        shown.append(writer.safe_text)
    writer.finish()
    return shown, writer


def test_no_half_character_is_ever_shown():
    text = "naïve 日本 🎉 Ω done"
    shown, writer = write(text)
    assert writer.text == text
    assert all("\ufffd" not in piece and text.startswith(piece) for piece in shown)


def test_text_that_ends_inside_a_character_ends_before_it():
    writer = Detokenizer(decode)
    for token in TOKENIZER("ok 🎉").input_ids[:-1]:
        writer.push(token)
    writer.finish()
    assert writer.text == "ok "


def test_bytes_that_are_no_character_do_not_hold_the_text_up():
    writer = Detokenizer(decode)
    for token in [TOKENIZER("é").input_ids[0]] * 12 + TOKENIZER("end").input_ids:
        writer.push(token)
    writer.finish()
    assert writer.text.endswith("end")


def test_a_stray_byte_does_not_swallow_the_character_after_it():
    stray = TOKENIZER("é").input_ids[:1]
    for text in ("🎉ok", "日本", "é"):
        writer = Detokenizer(decode)
        for token in [*stray, *TOKENIZER(text).input_ids]:
            writer.push(token)
        writer.finish()
        assert writer.text == "\ufffd" + text


def test_random_bytes_come_out_as_the_decoder_writes_them():
    rng = random.Random(1)
    for _ in range(200):
        tokens = [rng.randrange(256) for _ in range(30)] + TOKENIZER("end").input_ids
        writer = Detokenizer(decode)
        for token in tokens:
            writer.push(token)
        writer.finish()
        assert writer.text == decode(tokens)


def test_shown_text_is_never_taken_back():
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice("ab\n€") for _ in range(20))
        stop = "".join(rng.choice("ab\n€") for _ in range(3))
        shown, writer = write(text, [stop])
        assert all(writer.text.startswith(piece) for piece in shown)
        assert writer.text == text.split(stop)[0]


def test_the_first_of_several_stop_strings_cuts():
    assert write("one two three", ["three", "two"])[1].text == "one "
    assert write("one two three", ["three", "two"])[1].stopped_by == "two"


def test_the_start_of_a_stop_string_is_held_back():
    shown, _ = write("abcSTxyz", ["STOP"])
    assert shown[4] == "abc" and shown[5] == "abcSTx"


def all_or_nothing(tokens):
    """As tokenizers with byte fallback decode: where one byte is broken, all are."""
    try:
        return bytes(tokens).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(tokens)


def test_how_many_tokens_are_read_at_once_changes_nothing():
    rng = random.Random(0)
    pieces = ["a", "日", "🎉", b"\xe6", b"\xe6\x97", b"\x9f", "Ω", " "]
    for _ in range(300):
        chosen = rng.choices(pieces, weights=[8, 3, 3, 1, 1, 1, 3, 4], k=24)
        tokens = list(b"".join(p.encode() if isinstance(p, str) else p for p in chosen))
        for decoding in (all_or_nothing, lambda tokens: bytes(tokens).decode(errors="replace")):
            one_by_one = Detokenizer(decoding)
            shown = [one_by_one.text]
            for token in tokens:
                one_by_one.push(token)
                shown.append(one_by_one.text)
            one_by_one.finish()
            for longest in (3, 16, len(tokens)):
                writer = Detokenizer(decoding)
                read = 0
                while read < len(tokens):
                    bunch = tokens[read : read + rng.randint(1, longest)]
                    read += len(bunch)
                    writer.push(*bunch)
                    assert writer.text == shown[read]
                writer.finish()
                assert writer.text == one_by_one.text


def test_tokens_that_come_together_are_decoded_together():
    calls = []
    writer = Detokenizer(lambda tokens: calls.append(tokens) or decode(tokens))
    for _ in range(8):
        for token in TOKENIZER("sixteen letters.").input_ids:
            writer.push(token)
        assert writer.safe_text.endswith("letters.")
    assert len(calls) == 2 * 8  # and once more for what stays as neighbours
    assert max(map(len, calls)) <= 16 + NEIGHBOURS


def test_a_stop_string_is_found_at_its_last_token():
    writer = Detokenizer(decode, ["STOP"])
    for token in TOKENIZER("abSTOP").input_ids:
        assert writer.stopped_by is None
        writer.push(token)
    assert writer.stopped_by == "STOP"
