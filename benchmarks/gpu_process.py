"""The process of a case: it is killed when its time is over, and whatever becomes of it is a row.

    python benchmarks/gpu_process.py ASKED TOLD

is that process: it reads the one file and writes the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_table import Case

OK, WRONG, NO_MEMORY, TIMEOUT = "ok", "wrong", "out of memory", "timeout"
CRASHED, FAILED = "crashed", "failed"
FAKE = "fake"
_SHOWN_LINES, _SHOWN_CHARACTERS = 6, 1000
Row = dict[str, Any]


def apart(
    case: Case, seconds: float, options: Mapping[str, Any], environment: Mapping[str, str]
) -> Row:
    """The row of a case, from a process that is killed with all its children in the end."""
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder, "asked.json"), Path(folder, "told.json")
        values = {"function": case.function, "values": {**case.values, **options}}
        asked.write_text(json.dumps(values), encoding="utf-8")
        with Path(folder, "output").open("w+b") as output:
            child = subprocess.Popen(
                [sys.executable, __file__, str(asked), str(told)],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                return {"status": TIMEOUT, "error": f"not done after {seconds:.0f} s"}
            finally:
                _kill(child)
            if told.is_file():
                row: Row = json.loads(told.read_text(encoding="utf-8"))
                return row
            output.seek(0)
            return {"status": CRASHED, "error": _crash(code, output.read())}


def _kill(child: subprocess.Popen[bytes]) -> None:
    """The child and its group, whose id it has until it is waited for; what is left of the group
    keeps the id from being given anew."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _crash(code: int, output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"{how}: {' / '.join(lines)}"[:_SHOWN_CHARACTERS]


def one(asked: Path, told: Path) -> None:
    """A case, in its own process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with its parent
    wanted = json.loads(asked.read_text(encoding="utf-8"))
    module, function = wanted["function"].split(":")
    try:
        with _rehearsed() if wanted["values"]["device"] == FAKE else contextlib.nullcontext():
            found = getattr(importlib.import_module(module), function)(**wanted["values"])
        row = {"status": OK if found.pop("is_right", True) else WRONG, **found}
    except Exception as error:
        text = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
        is_memory = type(error).__name__ == "OutOfMemoryError" or "out of memory" in text
        status = NO_MEMORY if is_memory else FAILED
        row = {"status": status, "error": f"{type(error).__name__}: {text}"}
    unfinished = told.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(row), encoding="utf-8")
    unfinished.rename(told)
    sys.stdout.flush()
    os._exit(0)  # a library that hangs or crashes while Python ends has no say any more


@contextlib.contextmanager
def _rehearsed() -> Iterator[None]:
    """A GPU that is not there: its tensors have shapes and no numbers."""
    shim = importlib.import_module("elastrata.rehearsal.process")
    shim.load_shim()
    session = importlib.import_module("elastrata.rehearsal.session")
    with session.rehearsal(world_size=None):
        yield


if __name__ == "__main__":
    one(*map(Path, sys.argv[1:]))
