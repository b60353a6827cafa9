"""Put a trained drafter, or adapters, into the package, with a card and the curve of its training:

    PYTHONPATH=src python tools/ship_real.py drafter smollm FOLDER --curve CSV --card TEXT
    PYTHONPATH=src python tools/ship_real.py any-subset smollm FOLDER --curve CSV --card TEXT

FOLDER is what training left in 8 bits (`drafter-8bit`, `adapters-8bit`). TEXT says what the weights
are for, the command that made them, the machine and the date. What is shipped this way may take
24 MB in all.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import sys
from pathlib import Path

from forerun.checkpoints import adapters, drafters

MOST = 24_000_000  # bytes of all drafters and adapters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", help="drafter, or the family that adapters make of the model")
    parser.add_argument("model", help="the name of the model that it is for: smollm")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--curve", required=True, type=Path)
    parser.add_argument("--card", required=True, help="a few sentences")
    flags = parser.parse_args()
    home = drafters.HOME / flags.model
    if flags.kind != "drafter":
        home = adapters.HOME / flags.model / flags.kind
    home.mkdir(parents=True, exist_ok=True)
    for file in flags.folder.iterdir():
        shutil.copy(file, home / file.name)
    shutil.copy(flags.curve, home / "curve.csv")
    (home / "card.md").write_text(card(f"{flags.model}:{flags.kind}", flags.card, flags.curve))
    size = shipped_bytes()
    if size > MOST:
        sys.exit(f"{size:,} bytes are shipped now, more than {MOST:,}: take something out.")
    sys.stdout.write(f"{home}: {size:,} of {MOST:,} bytes are shipped now\n")


def card(name: str, text: str, curve: Path) -> str:
    """A name, what is known, and the last row of the curve."""
    with curve.open(newline="") as lines:
        last = list(csv.DictReader(lines))[-1]
    measured = "".join(f"\n- {column.replace('_', ' ')}: {value}" for column, value in last.items())
    return f"# {name}\n\n{text.strip()}\n\nWhere its training ended (`curve.csv`):\n{measured}\n"


def shipped_bytes() -> int:
    homes = (drafters.HOME, adapters.HOME)
    return sum(file.stat().st_size for home in homes for file in home.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
