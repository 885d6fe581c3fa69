"""Leaving a broken group of workers, with the process ready for the next one."""

from __future__ import annotations

import gc
import traceback
from threading import Event

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from elastrata.cluster.ray_train_internals import training_has_ended

_is_let_go = Event()


def began() -> None:
    """In a worker: it serves in a group from here on."""
    _is_let_go.clear()


def is_let_go(seconds: float) -> bool:
    """In a worker that has nothing left to do: whether it is told to leave within that time."""
    return _is_let_go.wait(seconds)


def leave(seconds: float) -> bool:
    """In a worker: waits for its training to end, and frees what belonged to its group.

    Gloo closes connections when the last object of a process group is freed, and by that the ranks
    that wait for this one learn of the end. NCCL's collectives never end by themselves where a rank
    is lost: they are aborted.

    Args:
        seconds: for the training thread to end.

    Returns:
        Whether the process is free.
    """
    _is_let_go.set()
    if torch.cuda.is_available() and dist.is_initialized():
        _abort_process_group()
    if not training_has_ended(seconds):
        return False
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return True


def release(error: BaseException | None) -> None:
    """Frees what an error holds of the calls that it came through: model, stream, groups."""
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
