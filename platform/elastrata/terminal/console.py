"""The console: text for people, one JSON object for programs, and a live view."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from html import unescape
from io import TextIOWrapper
from typing import Any, NoReturn, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text
from typing_extensions import override

from elastrata_pipelines.errors import escape_controls

_WIDER_THAN_ANY_TABLE = 10_000
STATE_STYLES = {
    "running": "cyan",
    "finished": "green",
    "stopped": "yellow",
    "failed": "bold red",
    "silent": "bold red",
}
"""Rich style of each state of a run."""


class _CleanConsole(Console):
    """Console that escapes control characters, since names and texts may come from files."""

    @override
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Rich's own control codes, such as those of a live view, stay.
            clean = segment.text if segment.control else escape_controls(segment.text)
            yield segment if clean == segment.text else Segment(clean, segment.style)

    @override
    def render_str(self, text: str, **options: Any) -> Text:
        # Before the widths of columns are measured.
        return super().render_str(escape_controls(text), **options)

    @override
    def on_broken_pipe(self) -> NoReturn:
        # Rich would exit, in a thread without a message.
        raise


def open_console(*, as_json: bool) -> Console:
    """Return the console for a command's text: standard output, or standard error under `--json`.

    In a file, a pipe or a notebook a table is as wide as its content.
    """
    console = _CleanConsole(
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


OUTPUT = "standard output"


class _Output(TextIOWrapper):
    """Standard output, whose errors have `OUTPUT` as the name of their file."""

    @override
    def write(self, text: str, /) -> int:
        with _naming_output():
            return super().write(text)

    @override
    def flush(self) -> None:
        with _naming_output():
            super().flush()


class _Errors(TextIOWrapper):
    """Standard error, which drops what cannot be written: there is no other place to say so."""

    @override
    def write(self, text: str, /) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    @override
    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


@contextmanager
def _naming_output() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = OUTPUT
        raise


def prepare_streams() -> None:
    """Open the standard streams that the caller has closed, and handle their errors and characters.

    Errors of standard output have `OUTPUT` as the name of their file; those of standard error are
    ignored. Characters that an encoding lacks are escaped.
    """
    # Otherwise the next opened file would get the number of the stream, and its text.
    for number, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)
    for number, name, kind in ((1, "stdout", _Output), (2, "stderr", _Errors)):
        # Python sets closed streams to None.
        old = getattr(sys, name) or os.fdopen(number, "w", encoding="utf-8", closefd=False)
        if type(old) is TextIOWrapper:
            flags = {"line_buffering": old.line_buffering, "write_through": old.write_through}
            setattr(sys, name, kind(old.detach(), old.encoding, "backslashreplace", "\n", **flags))


def drop_broken_output() -> None:
    """Drop the text that standard output cannot take, as its reader is gone or its disk is full."""
    try:
        sys.stdout.flush()
    except OSError:
        # Python flushes it once more at exit, and would report another failure.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules


def print_json_line(result: Mapping[str, Any]) -> None:
    """Write a command's result under `--json`, as the last line of standard output."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def print_error(*lines: str) -> None:
    """Write lines about a failure to standard error, without markup or wrapping."""
    sys.stderr.write("".join(f"{escape_controls(line, one_line=True)}\n" for line in lines))
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
