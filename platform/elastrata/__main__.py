"""Entry point of the command `elastrata` and of `python -m elastrata`."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Run the `elastrata` command with the arguments of this process."""
    # Before the imports, which take so long that a signal can arrive during them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    from elastrata.cli.main import main as run_command_line

    run_command_line()


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    """Exit as an interrupted command does."""
    # An exception would print the traceback of whatever module is being imported.
    line = b'{"status": "error", "errors": ["interrupted"]}\n'
    for stream, text in ((2, b"interrupted\n"), (1, line if "--json" in sys.argv else b"")):
        with suppress(OSError):  # closed by the caller
            os.write(stream, text)
    os._exit(130)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # As with the installed script, a file such as queue.py in the current folder hides nothing.
        del sys.path[0]
        sys.path.append("")
    main()
