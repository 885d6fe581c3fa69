"""The console: words for people on one stream, one JSON object for programs on the other."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from io import TextIOWrapper
from typing import Any

from rich.console import Console

_WIDER_THAN_ANY_TABLE = 10_000
STATE_STYLES = {
    "running": "cyan",
    "finished": "green",
    "stopped": "yellow",
    "failed": "bold red",
    "silent": "bold red",
}
"""How the states of a run are shown."""


def open_console(*, as_json: bool) -> Console:
    """Where a command writes for people: standard output, or standard error beside `--json`.

    In a file or a pipe a table is as wide as it must be: Rich would cut it at 80 columns. So it is
    in a notebook, which gets plain text: it says that it is a terminal, and shows no colours.
    """
    console = Console(
        stderr=as_json,
        highlight=False,
        soft_wrap=True,
        force_jupyter=False,
        force_terminal=False if is_notebook() else None,
    )
    if not console.is_terminal:
        console.width = max(console.width, _WIDER_THAN_ANY_TABLE)
    return console


def escape_foreign_letters() -> None:
    """Have standard output and errors escape what their encoding has no letter for."""
    # A run's name may hold any letter, and a file's name bytes that are no text: shown, not fatal.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules


def print_json_line(result: Mapping[str, Any]) -> None:
    """The last line of standard output of a command with `--json`."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def print_error(*lines: str) -> None:
    """Lines about a failure, as they are: no markup, no wrapping."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()
