"""Tokenizers of checkpoints, and the tokens that end a text. No code of a checkpoint runs: a
tokenizer that is remote code is read from its files instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.checkpoints.files import (
    Source,
    first_line,
    has_file,
    path_of,
    quiet,
    read_json,
)
from forerun.checkpoints.gguf import control_tokens, entry_of, kept_or_made, quick
from forerun.errors import BadCheckpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Remote classes that differ from one of the library's in nothing but their name.
SAME_AS = {"DreamTokenizer": "Qwen2Tokenizer"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "vocab.json")
# What chat templates write after a message. A model that was tuned on them ends its answer so.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|role_end|>")
# Appendix E.6 of Guo & Ermon: XLNet's pieces hold no white space, so these stand for it.
XLNET_SPACES = {"<cls>": "\n", "<sep>": "\t", "<unk>": "  ", "<pad>": "   "}


# Tokens to text; true: without those that stand for none.
Decode = Callable[[list[int], bool], str]


def decoder_of(tokenizer: Any) -> Decode:
    """How a tokenizer decodes. `transformers` looks at every token in Python before it asks the
    library that decodes, which takes twice as long as decoding: a stream does it for each token."""
    from transformers import PreTrainedTokenizerFast

    own, plain = type(tokenizer), PreTrainedTokenizerFast
    if issubclass(own, plain) and (own.decode, own._decode) == (plain.decode, plain._decode):
        return lambda tokens, skip: tokenizer.backend_tokenizer.decode(tokens, skip)
    return lambda tokens, skip: tokenizer.decode(
        tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )


def load_tokenizer(source: Source, config: Any = None) -> PreTrainedTokenizerBase | None:
    """The tokenizer; None if the checkpoint has none. A config that was read already need not be
    read again."""
    from transformers import AutoTokenizer, XLNetTokenizer

    if Path(source.place).is_dir() and not _has_tokenizer(source):
        return None
    try:
        with quiet():
            found: Any = AutoTokenizer.from_pretrained(**source.arguments, config=config)
    except Exception as error:
        if not _has_tokenizer(source):
            return None
        if "trust_remote_code" not in str(error):
            raise BadCheckpoint(
                f"model={source.name!r}: its tokenizer cannot be read: {first_line(error)}"
            ) from error
        found = _rebuilt(source, error)
    if source.gguf:
        _add_control_tokens(found, control_tokens(path_of(source, source.gguf)))
    return with_white_space(found) if isinstance(found, XLNetTokenizer) else found


def load_gguf_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file whose model is of the Llama shape: the library's for it, made
    without the config, whose classes take long to import."""
    from transformers import PreTrainedTokenizerFast

    path = path_of(source, str(source.gguf))

    def read(folder: Path) -> PreTrainedTokenizerBase:
        try:
            return PreTrainedTokenizerFast.from_pretrained(folder)
        except Exception as error:
            raise BadCheckpoint(f"{folder}: {first_line(error)}") from error

    def make() -> PreTrainedTokenizerBase:
        with quiet(), quick():
            found = PreTrainedTokenizerFast.from_pretrained(source.place, gguf_file=source.gguf)
        _add_control_tokens(found, control_tokens(path))
        return found

    def write(made: PreTrainedTokenizerBase, folder: Path) -> None:
        made.save_pretrained(folder)

    return kept_or_made(entry_of(path, "tokenizer"), read, make, write)


def _add_control_tokens(tokenizer: Any, words: Iterable[str]) -> None:
    """Have a tokenizer take control tokens as the one token that each is: some versions of the
    library know of a few only, and would spell the others."""
    from tokenizers import AddedToken

    known = {token.content for token in tokenizer.added_tokens_decoder.values()}
    missing = [AddedToken(w, special=True, normalized=False) for w in words if w not in known]
    if missing:
        tokenizer.add_tokens(missing, special_tokens=True)


def _has_tokenizer(source: Source) -> bool:
    """Are there files of a tokenizer? A GGUF file holds its own."""
    directory = Path(source.place)
    if source.gguf:
        return True
    if directory.is_dir():
        return any([*directory.glob(pattern)] for pattern in ("*token*", "vocab*", "spiece*"))
    return any(has_file(source, name) for name in (*TOKENIZER_FILES, "spiece.model"))


def _rebuilt(source: Source, problem: Exception) -> PreTrainedTokenizerBase:
    """A tokenizer whose class is remote code, from its files: added tokens, template and all."""
    import transformers

    written = str(read_json(source, "tokenizer_config.json").get("tokenizer_class", ""))
    same = SAME_AS.get(written)
    if has_file(source, "tokenizer.json"):
        same = "PreTrainedTokenizerFast"
    if same is None:
        raise BadCheckpoint(
            f"model={source.name!r}: its tokenizer is Python code ({written or 'no class named'}) "
            "without a tokenizer.json. Forerun never runs code of a checkpoint: convert it with "
            "save_pretrained, and add the tokenizer.json."
        ) from problem
    try:
        with quiet():
            return getattr(transformers, same).from_pretrained(**source.arguments)
    except Exception as error:
        raise BadCheckpoint(
            f"model={source.name!r}: its tokenizer cannot be read: {first_line(error)}"
        ) from error


def with_white_space(tokenizer: Any) -> PreTrainedTokenizerBase:
    """XLNet's tokenizer for text that goes on: nothing is put after it, and line breaks and
    indentation survive, under the names of `XLNET_SPACES`.

    Two spaces are `<unk>`, as its authors trained it; where the number is odd, the last three are
    `<pad>`. After each of them a word begins with a space of its own, which is not written.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    spelled = [normalizers.Replace(text, name) for name, text in list(XLNET_SPACES.items())[:3]]
    spelled.append(normalizers.Replace("<unk> ", "<pad>"))
    core.normalizer = normalizers.Sequence([*spelled, core.normalizer])
    core.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    before_a_word = "|".join(f"(?<={name})" for name in XLNET_SPACES)
    core.decoder = decoders.Sequence(
        [
            decoders.Fuse(),
            decoders.Strip("\u2581", 1, 0),
            decoders.Replace(Regex(f"(?:{before_a_word})\u2581"), ""),
            *(decoders.Replace(name, text) for name, text in XLNET_SPACES.items()),
            decoders.Replace("\u2581", " "),
        ]
    )
    written = [AddedToken(name, special=False, normalized=True) for name in XLNET_SPACES]
    core.add_tokens(written)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        mask_token="<mask>",
        clean_up_tokenization_spaces=False,
    )


def token_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many ids there are, from 0 to the last. Some may stand for nothing."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def fitting_count(name: str, tokenizer: PreTrainedTokenizerBase, rows: int) -> int:
    """How many of an embedding's rows stand for tokens: all, or fewer. A tokenizer with ids that
    it has no row for is refused. A special token may be one of the library's own making, which no
    text of the checkpoint has."""
    count = token_count(tokenizer)
    if count > rows:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {i for i in added if added[i].special}
        beyond = _beyond(tokenizer, rows)
        _refuse_beyond(name, {t: i for t, i in beyond.items() if i not in special}, rows)
    return min(count, rows)


def check_files_fit(source: Source, tokenizer: PreTrainedTokenizerBase | None, rows: int) -> None:
    """The same of a checkpoint, special tokens included if its files name them."""
    if tokenizer is None or not (beyond := _beyond(tokenizer, rows)):
        return
    files = [name for name in TOKENIZER_FILES if has_file(source, name)]
    text = "".join(path_of(source, name).read_text(encoding="utf-8") for name in files)
    named = {token: i for token, i in beyond.items() if json.dumps(token)[1:-1] in text}
    plain = {token: i for token, i in beyond.items() if token in text}
    _refuse_beyond(source.name, named | plain, rows)


def _beyond(tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[str, int]:
    return {token: i for token, i in tokenizer.get_vocab().items() if i >= rows}


def _refuse_beyond(name: str, beyond: dict[str, int], rows: int) -> None:
    if beyond:
        token, last = max(beyond.items(), key=lambda item: item[1])
        raise BadCheckpoint(
            f"model={name!r}: its tokenizer has {last + 1} tokens (the last is {token!r}) and its "
            f"embedding {rows}: they belong to different models, or tokens were added without "
            "resizing the embedding."
        )


def stop_tokens(
    tokenizer: PreTrainedTokenizerBase | None, *owners: Any, turn_ends: bool = False
) -> list[int]:
    """The tokens that end a text: those of every owner (a config, a generation config) and of the
    tokenizer; with `turn_ends` also what the chat template writes after a message."""
    found: list[int] = []
    for owner in (*owners, tokenizer):
        ends = owner.get("eos_token_id") if isinstance(owner, dict) else _ends_of(owner)
        found += _listed(ends)
    if turn_ends and tokenizer is not None:
        vocabulary = tokenizer.get_vocab()
        template = str(getattr(tokenizer, "chat_template", None) or "")
        found += [vocabulary[end] for end in TURN_ENDS if end in template and end in vocabulary]
    return list(dict.fromkeys(found))


def _ends_of(owner: Any) -> Any:
    return getattr(owner, "eos_token_id", None)


def _listed(ends: Any) -> Iterable[int]:
    if ends is None:
        return []
    return [int(end) for end in (ends if isinstance(ends, list | tuple) else [ends])]
