"""The checks of IFEval (Zhou et al., 2023, arXiv 2311.07911): is an instruction that can be checked
by a program followed? One function for each of the 25 published kinds, by its published name.

Two things differ from the published code, which needs NLTK's trained splitters: sentences end at
".", "!" or "?" before white space (not after an abbreviation), and words are runs between white
space and punctuation. Languages are told by `langdetect`, as published, here with a seed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
ABBREVIATIONS = re.compile(
    r"\b(?:mr|mrs|ms|dr|prof|st|capt|lt|inc|ltd|jr|sr|co|vs|etc|e\.g|i\.e|u\.s|ph\.d|[a-z])\.$",
    re.IGNORECASE,
)
FENCES = ("```json", "```Json", "```JSON", "```")

Check = Callable[..., bool]


def compare(count: int, relation: str, wanted: int) -> bool:
    return count < wanted if relation == "less than" else count >= wanted


def sentences(text: str) -> list[str]:
    found: list[str] = []
    for part in re.split(r"(?<=[.!?])[\"')\]]*\s+", text.strip()):
        if found and ABBREVIATIONS.search(found[-1]):
            found[-1] += " " + part
        elif part.strip():
            found.append(part)
    return found


def keywords_exist(text: str, keywords: Sequence[str]) -> bool:
    return all(re.search(word, text, re.IGNORECASE) for word in keywords)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return compare(len(re.findall(keyword, text, re.IGNORECASE)), relation, frequency)


def no_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def language_of(text: str) -> str | None:
    """The code of a text's language; None where none can be told, which counts as followed."""
    import langdetect

    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return None


def response_language(text: str, language: str) -> bool:
    return language_of(text) in (language, None)


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return compare(len(sentences(text)), relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs with *** between them; only the first and the last may be empty."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    if any(not part.strip() for part in parts[1:-1]):
        return False
    return sum(bool(part.strip()) for part in parts) == num_paragraphs


def number_words(text: str, num_words: int, relation: str) -> bool:
    return compare(len(re.findall(r"\w+", text)), relation, num_words)


def nth_paragraph_first_word(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if nth_paragraph > count or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    word = re.split(r"[.,?!'\"]", word)[0].lower()
    return count == num_paragraphs and word == first_word.lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    patterns = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    pattern = patterns.get(postscript_marker, rf"\s*{postscript_marker.lower()}.*$")
    return bool(re.findall(pattern, text.lower(), re.MULTILINE))


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


def constrained_response(text: str) -> bool:
    return any(answer in text for answer in CONSTRAINED)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    single = [part.strip("*").strip() for part in re.findall(r"\*[^\n\*]*\*", text)]
    double = [part.strip("*").strip() for part in re.findall(r"\*\*[^\n\*]*\*\*", text)]
    return sum(map(bool, [*single, *double])) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.split(rf"\s?{section_spliter}\s?\d+\s?", text)) - 1 >= num_sections


def json_format(text: str) -> bool:
    text = text.strip()
    for fence in FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except ValueError:
        return False
    return True


def title(text: str) -> bool:
    titles = re.findall(r"<<[^\n]+>>", text)
    return any(one.lstrip("<").rstrip(">").strip() for one in titles)


def two_responses(text: str) -> bool:
    """Two different answers with ****** between them."""
    parts = text.split("******")
    if any(not part.strip() for part in parts[1:-1]):
        return False
    answers = [part.strip() for part in parts if part.strip()]
    return len(answers) == 2 and answers[0] != answers[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    capitals = [word for word in re.findall(r"[\w'-]+", text) if word.isupper()]
    return compare(len(capitals), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    return text.isupper() and response_language(text, "en")


def english_lowercase(text: str) -> bool:
    return text.islower() and response_language(text, "en")


def no_comma(text: str) -> bool:
    return "," not in text


CHECKS: dict[str, Check] = {
    "keywords:existence": keywords_exist,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": no_forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}


# Those that tell languages apart.
NEED_LANGUAGE = (
    "language:response_language",
    "change_case:english_capital",
    "change_case:english_lowercase",
)


def follows(name: str, arguments: dict[str, Any], text: str) -> bool:
    """Does a text follow an instruction, word for word?"""
    given = {key: value for key, value in arguments.items() if value is not None}
    return bool(text.strip()) and CHECKS[name](text, **given)


def follows_loosely(name: str, arguments: dict[str, Any], text: str) -> bool:
    """Would it, without its first line, its last line, or its asterisks?"""
    lines = text.split("\n")
    cuts = [lines, lines[1:], lines[:-1], lines[1:-1]]
    texts = ["\n".join(cut).strip() if cut is not lines else text for cut in cuts]
    variants = [*texts, *(one.replace("*", "") for one in texts)]
    return any(follows(name, arguments, one) for one in variants)
