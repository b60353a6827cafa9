"""Write docs/gallery: one replay per method, each a page of its own that plays anywhere.

    python tools/gallery.py                 all methods
    python tools/gallery.py jacobi ssd      these only

Every replay is a run of an embedded model, recorded with all that a trace can show.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

import forerun
from forerun import registry
from forerun.api import Model
from forerun.evaluate.prompts import CODE
from forerun.page.assets import replay_html
from forerun.requests.traces import trace_lines

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "gallery"
PROMPT = CODE[1]  # a class with some repetition, as code has
TOKENS = 40
MODELS = ("zoo:ar", "zoo:any-subset", "zoo:masked", "zoo:block")


class Shown(NamedTuple):
    """How a method is shown, where that is not on the first model that can run it."""

    model: str | None = None
    draft: str | None = None
    options: dict[str, object] = {}


SHOWN = {
    "jacobi": Shown("zoo:consistency"),
    "multiblock": Shown("zoo:consistency"),
    "lookahead": Shown("zoo:consistency"),
    "speculative": Shown(draft="zoo:drafter"),
    "specdiff": Shown(draft="zoo:masked"),
    "specdiff-confidence": Shown(draft="zoo:masked"),
    "specdiff-ddpm": Shown(draft="zoo:masked"),
    "s2d2": Shown(options={"router": "score", "score": "static"}),
}


@cache
def loaded(name: str) -> Model:
    return forerun.load(name, lanes=1)


def model_for(method: str) -> Model:
    named = SHOWN.get(method, Shown()).model
    if named is not None:
        return loaded(named)
    found = registry.method_named(method)
    return next(one for one in map(loaded, MODELS) if found.runs_on(one.family))


def write_replay(method: str) -> None:
    """One run as one page."""
    model = model_for(method)
    shown = SHOWN.get(method, Shown())
    options = dict(shown.options)
    if method == "predicted":  # what the model would write, but for one name
        plain = model.generate(PROMPT, method="ar", max_tokens=TOKENS, ignore_eos=True)
        options["prediction"] = plain.text.replace("self", "this", 1)
    result = model.generate(
        PROMPT,
        method=method,
        draft=shown.draft,
        max_tokens=TOKENS,
        ignore_eos=True,
        record=True,
        **options,
    )
    lines = trace_lines(result, 0, lambda tokens: model.decode(tokens, special=True))
    page = replay_html(lines, f"{method} on {model.name}: a replay of Forerun")
    (GALLERY / f"{method}.html").write_text(page, encoding="utf-8")
    print(f"{method}: {len(page) // 1024} KiB, {result.stats.tokens_per_forward:.2f} per forward")


def write_index() -> None:
    rows = ["| method | guarantee | what it does |", "|---|---|---|"]
    for name in sorted(registry.BUILT_IN["methods"]):
        method = registry.method_named(name)
        rows.append(f"| [{name}]({name}.html) | {method.guarantee} | {method.summary} |")
    text = f"""# Gallery

One replay per method: real runs of the embedded models on the same prompt, {TOKENS} tokens at
temperature 0. Each is one file that loads nothing: save it, send it, open it.
`python tools/gallery.py` makes them. [The page](../page.md) says what the colours mean.

"""
    (GALLERY / "index.md").write_text(text + "\n".join(rows) + "\n", encoding="utf-8")


def main() -> None:
    warnings.simplefilter("ignore")
    GALLERY.mkdir(exist_ok=True)
    for method in sys.argv[1:] or sorted(registry.BUILT_IN["methods"]):
        write_replay(method)
    write_index()


if __name__ == "__main__":
    main()
