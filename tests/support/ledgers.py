"""Golden ledgers: the messages of every layout's step, one file for each, written anew by

    PYTHONPATH=tests python -m support.ledgers [MODEL|LAYOUT]...

A change of what ranks send each other is then seen in a diff, a line for each kind of message.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from elastrata.rehearsal.figures import RankFigures
from support.rehearsed_layouts import LAYOUTS, MODELS, layouts, rehearse_layout, worlds

FOLDER = Path(__file__).parents[1] / "ledgers"


def ledger(figures: Iterable[RankFigures]) -> list[str]:
    """A line for each kind of message: who talks, what is sent, how often, bytes in all."""
    return [
        f"rank {rank.rank}: {one.axis} of {one.ranks}: {one.kind} {one.dtype} {one.device}: "
        f"{one.count} times, {one.bytes:,} bytes"
        for rank in figures
        for one in rank.messages
    ]


def golden(model: str, layout: str, world_size: int) -> list[str]:
    """The ledger that is kept."""
    kept: dict[str, list[str]] = json.loads(_path(model, layout).read_text(encoding="utf-8"))
    return kept[str(world_size)]


def is_kept(model: str, layout: str) -> bool:
    """Whether there is a ledger of a layout."""
    return _path(model, layout).exists()


def _path(model: str, layout: str) -> Path:
    return FOLDER / f"{model}-{layout}.json"


def _write(names: Sequence[str]) -> None:
    """Of all that are named; where no model is, or no layout, of all of these."""
    models = [name for name in names if name in MODELS] or MODELS
    named = [name for name in names if name in LAYOUTS] or LAYOUTS
    for model in models:
        for layout in (layout for layout in layouts(model) if layout in named):
            kept = {
                str(size): ledger(rehearse_layout(model, layout, size))
                for size in worlds(model, layout)
            }
            _path(model, layout).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            print(_path(model, layout), flush=True)


if __name__ == "__main__":
    _write(sys.argv[1:])
