"""The console: text for people, one JSON object for programs, and a live view."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Mapping
from html import unescape
from io import TextIOWrapper
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from typing_extensions import override

_WIDER_THAN_ANY_TABLE = 10_000
STATE_STYLES = {
    "running": "cyan",
    "finished": "green",
    "stopped": "yellow",
    "failed": "bold red",
    "silent": "bold red",
}
"""Rich style of each state of a run."""


def open_console(*, as_json: bool) -> Console:
    """Return the console for a command's text: standard output, or standard error under `--json`.

    In a file, a pipe or a notebook a table is as wide as its content.
    """
    console = Console(
        stderr=as_json,
        highlight=False,
        soft_wrap=True,
        force_jupyter=False,
        force_terminal=False if is_notebook() else None,
    )
    if not console.is_terminal:
        # Rich would cut tables at 80 columns. A notebook claims to be a terminal, but shows no
        # colours.
        console.width = max(console.width, _WIDER_THAN_ANY_TABLE)
    return console


def escape_foreign_letters() -> None:
    """Make standard output and error escape characters that their encoding lacks."""
    # A run's name may have any character, and a file's name undecodable bytes: neither may fail.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules


def print_json_line(result: Mapping[str, Any]) -> None:
    """Write a command's result under `--json`, as the last line of standard output."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def print_error(*lines: str) -> None:
    """Write lines about a failure to standard error, without markup or wrapping."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()


_REFRESHES_PER_SECOND = 4
_NOTEBOOK_COLUMNS = 110


class LiveView:
    """A view in a terminal or notebook that is updated in place; elsewhere it shows nothing.

    Args:
        console: console to show it on.
    """

    def __init__(self, console: Console) -> None:
        self._notebook = _notebook_display()
        is_terminal = console.is_terminal and self._notebook is None
        self._live = (
            Live(console=console, refresh_per_second=_REFRESHES_PER_SECOND, transient=True)
            if is_terminal
            else None
        )

    @property
    def is_live(self) -> bool:
        """True if views are shown."""
        return self._live is not None or self.stays

    @property
    def stays(self) -> bool:
        """True if the last view remains visible at the end."""
        return self._notebook is not None

    def update(self, view: RenderableType, html: str | None = None) -> None:
        """Replace the view.

        Args:
            view: the new view.
            html: the same for notebooks; default: derived from `view`.
        """
        if self._notebook is not None:
            self._notebook.update(_Html(_as_html(view) if html is None else html))
        elif self._live:
            self._live.update(view)

    def start(self) -> None:
        """Start the live display at the end of the terminal."""
        if self._live:
            self._live.start()

    def stop(self) -> None:
        """Remove the view from the terminal. A notebook keeps it."""
        if self._live:
            self._live.stop()


class LiveBlock:
    """Context manager with a live view and lines above it.

    Args:
        console: console to write to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._view = LiveView(console)

    def __enter__(self) -> Self:
        self._view.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._view.stop()

    def _write(self, line: str) -> None:
        self._console.print(line, markup=False)


class _Html:
    """HTML for a notebook."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_html_(self) -> str:
        return self._text

    @override
    def __repr__(self) -> str:
        """Return the text, for viewers that show notebooks without HTML."""
        return unescape(re.sub(r"<[^>]*>", "", self._text)).strip()


def _notebook_display() -> Any:
    """Return the handle of a new display in a notebook; None elsewhere."""
    if not is_notebook():
        return None
    from IPython.display import display

    return display(_Html(""), display_id=True)  # type: ignore[no-untyped-call]


def _as_html(view: RenderableType) -> str:
    nowhere = io.StringIO()
    paper = Console(record=True, file=nowhere, width=_NOTEBOOK_COLUMNS, force_jupyter=False)
    paper.print(view)
    return paper.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
