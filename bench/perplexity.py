"""What quantising does to a model: its perplexity before and after, and how far its laws move.

    python bench/perplexity.py --model FOLDER_OR_FILE [--quantize int8 int4 fp8] [--device cuda]
        [--dtype bfloat16] [--json FILE]
    python bench/perplexity.py --publish FILE ...       (writes docs/models.md's table)

The text is our own docs, in windows of 512 tokens, each token given those before it. 'KL' is the
mean divergence of a token's law from that of the model as it was; 'same first' is the share of
places at which both would write the same token.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from page import DOCS, write_part

import forerun
from forerun.engine.pack import Batch
from forerun.errors import NotAble
from forerun.sequence.rows import Plan, causal_rows

SIZE = 512
START = "<!-- perplexity -->"
END = "<!-- end of perplexity -->"
PAGES = Path(__file__).parents[1] / "docs"


def text() -> str:
    return "\n\n".join((PAGES / name).read_text() for name in ("glossary.md", "design.md"))


@torch.inference_mode()
def laws(model: forerun.Model, windows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of all tokens at every place, and the tokens that came."""
    assert model.tokenizer is not None
    ids = np.array(model.tokenizer(text()).input_ids)[: windows * SIZE]
    found = []
    slots = model.backbone.make_slots(1, SIZE)
    for first in range(0, len(ids) - SIZE + 1, SIZE):
        window = ids[first : first + SIZE]
        plan = Plan(causal_rows(window), [np.arange(SIZE)], SIZE, causal=SIZE)
        batch = Batch([(0, plan, 0)], slots.table, model.backbone.device)
        logits = model.backbone.forward(batch, slots)[:-1].float()
        found.append(logits.log_softmax(-1).cpu())
    wanted = [ids[i : i + SIZE][1:] for i in range(0, len(ids) - SIZE + 1, SIZE)]
    return torch.cat(found), torch.from_numpy(np.concatenate(wanted))


def measured(flags: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    plain = None
    for quantize in (None, *flags.quantize):
        try:
            model = forerun.load(
                flags.model,
                device=flags.device,
                dtype=flags.dtype,
                lanes=1,
                max_context=SIZE,
                quantize=quantize,
            )
        except NotAble as error:
            print(f"{quantize}: {error}")
            continue
        with model:
            found, tokens = laws(model, flags.windows)
            backbone: Any = model.backbone
            size = backbone.weight_bytes
            numbers = str(backbone.dtype).removeprefix("torch.")
        plain = found if plain is None else plain
        loss = -found.gather(1, tokens[:, None]).mean()
        kl = (plain.exp() * (plain - found)).sum(-1).mean()
        same = (plain.argmax(-1) == found.argmax(-1)).float().mean()
        rows.append(
            {
                "weights": quantize or numbers,
                "MB": size / 1e6,
                "perplexity": float(loss.exp()),
                "KL": float(kl),
                "same first": float(same),
            }
        )
        print(rows[-1], flush=True)
        del model, found, backbone
        gc.collect()
    return rows


def table(reports: Sequence[dict[str, Any]]) -> str:
    names = ("model", "weights", "MB", "perplexity", "KL", "same first")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for report in reports:
        for row in report["rows"]:
            cells = (f"{row['MB']:.0f}", f"{row['perplexity']:.3f}", f"{row['KL']:.4f}")
            model = f"{report['name']}, {report['device']}"
            share = f"{row['same first']:.1%}"
            lines.append(f"| {' | '.join((model, row['weights'], *cells, share))} |")
    return "\n".join([*lines, "", f"`bench/perplexity.py`, {reports[0]['date']}."])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--quantize", nargs="*", default=["int8", "int4", "fp8"])
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--name", help="of the model, for the table; default: its folder's")
    parser.add_argument("--publish", type=Path, nargs="*", help="tables of these files")
    flags = parser.parse_args()
    if flags.publish:
        reports = [json.loads(file.read_text()) for file in flags.publish]
        return write_part(DOCS / "models.md", table(reports), START, END)
    if flags.model is None:
        parser.error("--model is missing")
    device = torch.device(flags.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    report = {
        "name": flags.name or Path(flags.model).name,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "date": date.today().isoformat(),
        "rows": measured(flags),
    }
    if flags.json:
        flags.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
