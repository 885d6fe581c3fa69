"""The page of all commands, `docs/reference/commands.md`: their options, and notes on their JSON.

`python tests/support/command_page.py` writes it anew; `tests/platform_/test_docs.py` compares it.
The notes are in `command_notes.md`; tests compare the keys in them with what the commands print.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from elastrata.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"
NOTES = Path(__file__).with_name("command_notes.md")
_EVERYWHERE = {"--help", "--json"}


def command_page() -> str:
    """Return the notes, with the help and the options of every command below its heading."""
    notes = NOTES.read_text(encoding="utf-8")
    return re.sub(r"^### (\w+)\n", _describe, notes, flags=re.MULTILINE)


def _describe(heading: re.Match[str]) -> str:
    command: Any = typer.main.get_command(app).commands[heading[1]]  # type: ignore[attr-defined]
    commands = getattr(command, "commands", None) or {heading[1]: command}
    rows = [row for command in commands.values() for row in _rows(command)]
    table = ["| option | meaning |", "|---|---|", *dict.fromkeys(rows), ""] if rows else []
    return "\n".join([heading[0], *table])


def _rows(command: Any) -> Iterator[str]:
    """Yield a row for each argument and option that has a help text."""
    for parameter in command.params:
        options = [name for name in (*parameter.opts, *parameter.secondary_opts) if "--" in name]
        text = " ".join((getattr(parameter, "help", None) or "").split())
        if text and not parameter.hidden and not _EVERYWHERE.intersection(options):
            argument = parameter.metavar or str(parameter.name).upper()
            names = ", ".join(f"`{name}`" for name in options or [argument])
            cells = [cell.replace("|", "\\|") for cell in (names, text)]
            yield f"| {cells[0]} | {cells[1]} |"


if __name__ == "__main__":
    PAGE.write_text(command_page(), encoding="utf-8")
