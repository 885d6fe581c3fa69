"""The line of a program that makes torch do something."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_PYTHON = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Line:
    """A line of a program."""

    file: str
    """With the name of its folder, such as `core/step.py`."""
    number: int
    function: str

    @property
    def place(self) -> str:
        """As compilers say it, such as `core/step.py:83`."""
        return f"{self.file}:{self.number}" if self.number else self.file


def current_line() -> Line:
    """The innermost line that is neither torch's nor Python's; torch's own where it has no caller,
    as in the threads of a backward pass."""
    frame: FrameType | None = sys._getframe(1)
    torchs = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH):
            torchs = torchs or frame
        elif not _is_pythons(file) and not file.startswith(_HERE):
            return _line(frame)
        frame = frame.f_back
    return _line(torchs) if torchs else Line("torch", 0, "")


def _is_pythons(file: str) -> bool:
    return file.startswith("<") or (file.startswith(_PYTHON) and "site-packages" not in file)


def _line(frame: FrameType) -> Line:
    code, path = frame.f_code, Path(frame.f_code.co_filename)
    return Line(f"{path.parent.name}/{path.name}", frame.f_lineno, code.co_name)
