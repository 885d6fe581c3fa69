"""Traces of a hang: the collectives of each rank, from PyTorch's flight recorder.

The driver kills a group that hangs, and with it what its ranks waited for. So each rank writes its
trace shortly before, and the driver names the files. `torchfrtrace --prefix` compares them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from elastrata.cluster.hang_detection import HeartbeatTimeout

TRACE_VARIABLES = {
    # Collectives that the flight recorder keeps; the default of some versions is 0.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    # NCCL's own watchdog writes the same files when a collective fails.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Environment of all workers."""
_SHARE = 0.8
"""Share of `workers.hang_seconds` after which a silent rank writes its trace."""
_LONGEST_LOOK_SECONDS = 1.0
_MOST_SECONDS = 1_000_000.0
"""Longest time-out of a group: stores count milliseconds in 31 bits."""


def trace_prefix(run: str) -> str:
    """Return the path of the traces on every node, without the rank at its end.

    Args:
        run: URI of the run.
    """
    name = hashlib.sha256(run.encode()).hexdigest()[:8]
    return str(Path(tempfile.gettempdir(), f"elastrata-{name}-rank-"))


def group_timeout(hang_seconds: float) -> float:
    """Return the time-out of process groups in seconds, longer than that of the driver.

    NCCL's watchdog, whose default is ten minutes, would otherwise end processes before the driver
    has found which rank hangs.
    """
    return max(1800.0, min(2 * hang_seconds, _MOST_SECONDS))


def set_group_timeouts(hang_seconds: float) -> None:
    """Set the time-out of every process group of this process, also those of mesh axes."""
    for group in list(_world.pg_map):
        _set_pg_timeout(timedelta(seconds=group_timeout(hang_seconds)), group)


class HangTrace:
    """Writes this rank's trace once it has made no progress for a while, in its own thread.

    Args:
        prefix: path of the file, without the rank.
        rank: rank of this process.
        hang_seconds: time without progress after which the driver kills the group.
    """

    def __init__(self, prefix: str, rank: int, hang_seconds: float) -> None:
        self._file = Path(f"{prefix}{rank}")
        with suppress(OSError):  # of an earlier hang, or another user's
            self._file.unlink(missing_ok=True)
        # Where NCCL's own watchdog writes; PyTorch appends the rank.
        os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = prefix
        seconds = _SHARE * hang_seconds
        self._timeout, self._has_progressed = HeartbeatTimeout(seconds), Event()
        self._look_seconds = min(_LONGEST_LOOK_SECONDS, seconds / 4)
        self._closed = Event()
        Thread(target=self._watch, name="elastrata-hang-trace", daemon=True).start()

    def note_progress(self) -> None:
        """Note that this rank has finished a step or sent an event."""
        self._has_progressed.set()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self) -> None:
        is_written = False
        while not self._closed.wait(self._look_seconds):
            if self._has_progressed.is_set():
                self._has_progressed.clear()
                self._timeout.beat()
                is_written = False
            if self._timeout.is_over(time.monotonic()) and not is_written:
                is_written = True
                # The file is a help only: a full disk must not end a run that may go on.
                with suppress(OSError):
                    part = self._file.with_name(f"{self._file.name}.part")
                    part.write_bytes(_read_trace())
                    part.replace(self._file)


def _read_trace() -> bytes:
    """Return the newest collectives of this process, pickled: of NCCL on GPUs, else of gloo."""
    is_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    name = "_dump_nccl_trace" if is_nccl else "_dump_fr_trace"
    dump: Callable[[], bytes] | None = getattr(_distributed_c10d, name, None)
    return dump() if dump else b""
