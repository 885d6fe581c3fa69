"""The console: text for people, one JSON object for programs, and a view that moves."""

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


_REFRESHES_PER_SECOND = 4
_NOTEBOOK_COLUMNS = 110


class LiveView:
    """Shows one view at a time, in the place of the one before; nothing where output is neither a
    terminal nor a notebook.

    Args:
        console: where to show it.
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
        """Whether anything is shown."""
        return self._live is not None or self.stays

    @property
    def stays(self) -> bool:
        """Whether the last view is still there at the end."""
        return self._notebook is not None

    def update(self, view: RenderableType, html: str | None = None) -> None:
        """Shows this in the place of what was shown.

        Args:
            view: what to show.
            html: the same for notebooks. Default: made of the view.
        """
        if self._notebook is not None:
            self._notebook.update(_Html(_as_html(view) if html is None else html))
        elif self._live:
            self._live.update(view)

    def start(self) -> None:
        """Takes the end of the terminal."""
        if self._live:
            self._live.start()

    def stop(self) -> None:
        """Gives the terminal back, without what was shown. A notebook keeps it."""
        if self._live:
            self._live.stop()


class ShownLive:
    """A block that shows a live view as long as it runs, and lines beside it.

    Args:
        console: where to show it.
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
    """HTML that a notebook shows as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_html_(self) -> str:
        return self._text

    @override
    def __repr__(self) -> str:
        """For what shows notebooks without HTML."""
        return unescape(re.sub(r"<[^>]*>", "", self._text)).strip()


def _notebook_display() -> Any:
    """The handle of a fresh display where this is a notebook, else None."""
    if not is_notebook():
        return None
    from IPython.display import display

    return display(_Html(""), display_id=True)  # type: ignore[no-untyped-call]


def _as_html(view: RenderableType) -> str:
    nowhere = io.StringIO()
    paper = Console(record=True, file=nowhere, width=_NOTEBOOK_COLUMNS, force_jupyter=False)
    paper.print(view)
    return paper.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
