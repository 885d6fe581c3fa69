"""A live view: a few lines that are rewritten in place, on a terminal or in a notebook."""

from __future__ import annotations

import io
import sys
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live

_REFRESHES_PER_SECOND = 4
_NOTEBOOK_COLUMNS = 110


class LiveView:
    """Shows one view at a time as long as its block runs; nothing where output is neither a
    terminal nor a notebook.

    Args:
        console: where to show it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._notebook = notebook_display()
        is_terminal = console.is_terminal and self._notebook is None
        self._live = (
            Live(console=console, refresh_per_second=_REFRESHES_PER_SECOND, transient=True)
            if is_terminal
            else None
        )

    @property
    def is_live(self) -> bool:
        """Whether anything is shown."""
        return self._live is not None or self._notebook is not None

    def update(self, view: RenderableType) -> None:
        """Shows this in the place of what was shown."""
        if self._notebook is not None:
            self._notebook.update(Html(_as_html(view)))
        elif self._live:
            self._live.update(view)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()


class Html:
    """HTML that a notebook shows as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_html_(self) -> str:
        return self._text


def notebook_display() -> Any:
    """The handle of a fresh display where this is a notebook, else None."""
    if "ipykernel" not in sys.modules:
        return None
    from IPython.display import display

    return display(Html(""), display_id=True)  # type: ignore[no-untyped-call]


def _as_html(view: RenderableType) -> str:
    nowhere = io.StringIO()
    paper = Console(record=True, file=nowhere, width=_NOTEBOOK_COLUMNS, force_jupyter=False)
    paper.print(view)
    return paper.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
