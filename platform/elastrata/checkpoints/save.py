"""Saving of checkpoints in the background: committed last, loadable at any world size."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save

from elastrata.checkpoints.commit import (
    ATTEMPT,
    MARKER,
    Commit,
    CommitStorage,
    FileRecord,
    FolderName,
    list_folders,
    size_problems,
)
from elastrata.checkpoints.dcp_writer import CachingPlanner, CommitWriter, RawWriter
from elastrata.checkpoints.retention import prune, remove
from elastrata.checkpoints.staging import StagedCopy, StagedCopyStager, Stager
from elastrata_pipelines.storage import FULL

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long the fastest rank waits for the slowest one to write its part."""


class DurableSaver:
    """Saver of a run's state in the background; one per group of workers, on every rank.

    A save copies the state into main memory, returns, and continues in a background thread. At most
    one save is in flight. A failed save leaves no commit and does not stop the training.

    The callbacks are called on rank 0, in the background thread.

    Args:
        storage: the run's folder of checkpoints.
        keep_last: number of newest commits to keep.
        keep_best: whether to keep the commit with the smallest evaluation loss, too.
        keep_every: see `prune`.
        keep_steps: see `prune`.
        attempt: number of this group of workers, equal on all ranks and larger than that of any
            commit in `storage`. Default: found by a listing.
        lean: save cheaply what is short-lived: tensors as raw bytes, which other tools cannot read,
            and files without SHA-256, so that only sizes are verified.
        stager: copies the states; savers of one state should share it. Default: a new one.
        what: name of a commit in warnings.
        warn: called with one line if a save, or the clean-up after it, has failed.
        on_commit: called with every new commit.
        before_removal: see `prune`.
        on_remove: called with every commit that retention has removed.

    Raises:
        RuntimeError: torch.distributed is not initialised, or rank 0 cannot list the storage.
    """

    def __init__(
        self,
        storage: CommitStorage,
        *,
        keep_last: int,
        keep_best: bool,
        keep_every: int | None = None,
        keep_steps: Sequence[int] = (),
        attempt: int | None = None,
        lean: bool = False,
        stager: Stager | None = None,
        what: str = "checkpoint",
        warn: Callable[[str], None],
        on_commit: Callable[[Commit], None] = lambda _: None,
        before_removal: Callable[[Sequence[str]], None] = lambda _: None,
        on_remove: Callable[[Commit], None] = lambda _: None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("saving needs torch.distributed, also with one process")
        self._storage = storage
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._keep_every, self._keep_steps = keep_every, keep_steps
        self._writer = RawWriter if lean else CommitWriter
        self._what = what
        self._warn = warn
        self._on_commit = on_commit
        self._before_removal = before_removal
        self._on_remove = on_remove
        # A separate group: background collectives must not interleave with those of the training.
        self._group = dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT)
        self._attempt, self._token = _agree_on_attempt(storage, self._group, attempt)
        self._planner = CachingPlanner()
        self._stager = stager or Stager()
        self._idle = threading.Event()
        self._idle.set()
        self._saved_step: int | None = None
        self.is_disk_full = False
        """True on rank 0 if the last save failed because a disk is full."""

    def save(
        self,
        state: dict[str, Any],
        *,
        step: int,
        samples: int,
        tokens: int,
        extra: Mapping[str, Any] | None = None,
    ) -> float:
        """Save `state` as it is now. Collective: all ranks call it, each with its shards.

        Waits for the previous save first. A step that this saver has committed is not saved again.

        Args:
            state: nested dicts of tensors (DTensors if sharded) and plain values.
            step: optimizer steps done.
            samples: samples seen, over all workers.
            tokens: tokens seen, over all workers.
            extra: JSON for the marker; `EVALUATION_LOSS` decides which commit is best.

        Returns:
            Seconds that the caller waited.
        """
        started = time.perf_counter()
        self.wait()
        if step == self._saved_step:
            return time.perf_counter() - started
        folder = str(FolderName(self._attempt, step, self._token))

        def commit(files: dict[str, FileRecord]) -> None:
            self._commit(
                Commit(
                    folder=folder,
                    step=step,
                    samples=samples,
                    tokens=tokens,
                    extra={**(extra or {}), ATTEMPT: self._attempt},
                    files=files,
                )
            )

        copy = self._stager.stage(state, step)
        try:
            future = async_save(
                copy.state,
                storage_writer=self._writer(
                    self._storage, folder, self._planner, copy.wait, commit
                ),
                planner=self._planner,
                process_group=self._group,
                async_stager=StagedCopyStager(copy),
            )
        # Without a future no callback would release the copy.
        except BaseException:
            copy.release()
            raise
        # Only after async_save: an error above must not leave the saver busy forever.
        self._idle.clear()
        cast("Future[Any]", future).add_done_callback(
            lambda done: self._settle(done.exception(), step, folder, copy)
        )
        return time.perf_counter() - started

    def all_idle(self) -> bool:
        """Return whether no rank has a save in flight, so that `save` would not wait.

        Collective over the default process group, which must support CPU tensors: all ranks call it
        at the same place among the collectives of the training.
        """
        saving = torch.tensor(self.saving, dtype=torch.int32)
        dist.all_reduce(saving, dist.ReduceOp.MAX)
        return not saving.item()

    @property
    def saving(self) -> bool:
        """Whether a save is in flight."""
        return not self._idle.is_set()

    def all_saved(self, step: int) -> bool:
        """Return whether this saver's newest commit is that of `step` on all ranks. Collective,
        like `all_idle`."""
        saved = torch.tensor(self._saved_step == step, dtype=torch.int32)
        dist.all_reduce(saved, dist.ReduceOp.MIN)
        return bool(saved.item())

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until no save is in flight, successful or not, for at most `seconds`. Return whether
        that is so."""
        return self._idle.wait(seconds)

    def close(self) -> None:
        """Wait for the save in flight and free the process group. All ranks call it."""
        self.wait()
        self._planner.forget()
        dist.destroy_process_group(self._group)

    def _commit(self, commit: Commit) -> None:
        # Before the marker is written: the storage may have lost a file without an error.
        if wrong := size_problems(self._storage, commit):
            raise OSError(f"incomplete: {wrong[0]}")
        self._storage.write(commit.to_json(), commit.folder, MARKER)
        try:
            self._on_commit(commit)
            removed = prune(
                self._storage,
                keep_last=self._keep_last,
                keep_best=self._keep_best,
                keep_every=self._keep_every,
                keep_steps=self._keep_steps,
                before_removal=self._before_removal,
            )
            for commit in removed:
                self._on_remove(commit)
        except Exception as error:
            self._warn(
                f"{self._what} of step {commit.step} is saved, but cleaning up after it failed: "
                f"{_text(error)}"
            )

    def _settle(
        self, error: BaseException | None, step: int, folder: str, copy: StagedCopy
    ) -> None:
        try:
            self.is_disk_full = getattr(_cause(error), "errno", None) in FULL
            if error is None:
                self._saved_step = step
            elif dist.get_rank(self._group) == 0:
                self._clean_up(error, folder)
                self._warn(
                    f"{self._what} of step {step} failed, training continues: {_reason(error)}"
                )
        finally:
            copy.release()
            self._idle.set()

    def _clean_up(self, error: BaseException, folder: str) -> None:
        # A CheckpointException means that every rank has stopped writing and reported it. After any
        # other error a rank may still write; a later prune removes such a folder.
        if isinstance(error, CheckpointException):
            with suppress(Exception):
                remove(self._storage, folder)


def replica_saver(
    storage: CommitStorage,
    *,
    attempt: int,
    warn: Callable[[str], None],
    stager: Stager | None = None,
) -> DurableSaver:
    """Return a saver for in-memory checkpoints: it keeps only the newest commit, and saves
    cheaply."""
    return DurableSaver(
        storage,
        keep_last=1,
        keep_best=False,
        attempt=attempt,
        lean=True,
        stager=stager,
        what="hot copy",
        warn=warn,
    )


def _agree_on_attempt(
    storage: CommitStorage, group: dist.ProcessGroup, attempt: int | None
) -> tuple[int, str]:
    """Return the number of this attempt and its random token, equal on all ranks.

    Raises:
        RuntimeError: rank 0 cannot list the storage.
    """
    agreed: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            if attempt is None:
                attempt = 1 + max((folder.attempt for folder in list_folders(storage)), default=0)
            agreed = [(attempt, uuid.uuid4().hex[:6])]
        except Exception as error:
            # Broadcast, too: without any answer the other ranks would wait for ever.
            agreed = [f"{storage.url}: cannot be listed: {_text(error)}"]
    dist.broadcast_object_list(agreed, src=0, group=group)
    if isinstance(agreed[0], str):
        raise RuntimeError(agreed[0])
    return cast(tuple[int, str], agreed[0])


def _cause(error: BaseException | None) -> BaseException | None:
    """Return the error of the first rank that failed."""
    if not isinstance(error, CheckpointException):
        return error
    return next(iter(error.failures.values()))[0]


def _reason(error: BaseException) -> str:
    """Return in one line what went wrong, and on which rank."""
    if not isinstance(error, CheckpointException):
        return _text(error)
    rank, (cause, _) = next(iter(error.failures.items()))
    more = f" (and {len(error.failures) - 1} more ranks)" if len(error.failures) > 1 else ""
    return f"rank {rank}: {_text(cause)}{more}"


def _text(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
