"""The fork of a run: a folder whose first checkpoint is one of another run's."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj
from typing import Any

from elastrata.checkpoints.commit import (
    ATTEMPT,
    EVALUATION,
    EVALUATION_LOSS,
    FRESH_OPTIMIZER,
    MARKER,
    Commit,
    FolderName,
    size_problems,
)
from elastrata.recipe.recipe import Recipe
from elastrata.run.claim import claim, folder_kind
from elastrata.run.folder import RECIPE_FILE, DataSet, RunIdentity, write_identity
from elastrata.run.history import HistoryWriter, restore_history, without_history
from elastrata.run.inherited import FORKED
from elastrata.run.mixtures import Mixtures
from elastrata.run.ownership import owner_is_alive
from elastrata.run.parent import ForkOrigin
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

_FIRST = 1
"""The attempt of a fork that did nothing but begin it."""


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A run that is to go on from another one's checkpoint."""

    run: Storage
    """Its folder; nothing is in it yet."""
    recipe: Recipe
    data: tuple[DataSet, ...]
    """That of every phase."""
    parent: Storage
    commit: Commit
    """The parent's checkpoint."""
    positions: Mapping[str, int]
    """As `ForkOrigin` has them."""
    fresh_optimizer: bool
    """Whether the optimizer's state stays behind."""
    mixtures: Mixtures | None = None
    """As `RunIdentity` has them."""

    @property
    def origin(self) -> ForkOrigin:
        """The parent, by place and checksum."""
        marker = self.parent.read("checkpoints", self.commit.folder, MARKER)
        return ForkOrigin(
            url=self.parent.uri(),
            commit=self.commit.folder,
            sha256=hashlib.sha256(marker).hexdigest(),
            step=self.commit.step,
            samples=self.commit.samples,
            tokens=self.commit.tokens,
            positions=dict(self.positions),
        )


def begin_fork(fork: Fork) -> None:
    """Write the folder of a fork, as a run that was stopped after the parent's step.

    A run begins to exist with the last file that is written. Nothing is left of a fork that fails.

    Raises:
        UserError: the parent's checkpoint has gone, the folder holds something or another command
            works in it, or it cannot be written.
    """
    try:
        with claim(fork.run, "run", lost=_refuse):
            if folder_kind(fork.run) != "nothing":
                raise UserError(f"{fork.run.uri()}: was begun by another command just now")
            try:
                _write(fork)
            except BaseException:
                for name in ("checkpoints", "history", RECIPE_FILE):
                    fork.run.delete(name)
                raise
    except OSError as error:
        raise UserError(f"{fork.run.uri()}: cannot be begun ({error})") from None


def _write(fork: Fork) -> None:
    origin = fork.origin
    if owner_is_alive(fork.parent) is False:
        restore_history(fork.parent.sub("history"), fork.commit)
    _copy_commit(fork)
    writer = HistoryWriter(fork.run.sub("history"), _FIRST, _refuse, writer="d")
    writer.add(FORKED, _entry(origin))
    writer.flush()
    write_identity(
        fork.run,
        RunIdentity(name=_name(fork.run), data=fork.data, origin=origin, mixtures=fork.mixtures),
        fork.recipe,
    )


def _entry(origin: ForkOrigin) -> dict[str, Any]:
    values = origin.model_dump(mode="json", exclude={"url", "positions"})
    return {"parent": origin.url, **values}


def _copy_commit(fork: Fork) -> None:
    """Copies the parent's checkpoint, as one of the fork's first attempt; the marker last."""
    source, target = fork.parent.sub("checkpoints"), fork.run.sub("checkpoints")
    token = fork.commit.folder.rpartition("-")[2]
    own = fork.commit.model_copy(
        update={
            "folder": str(FolderName(_FIRST, fork.commit.step, token)),
            "extra": _extra(fork),
        }
    )
    for name in own.files:
        _copy_file(source.sub(fork.commit.folder), target.sub(own.folder), name)
    if wrong := size_problems(target, own):
        raise UserError(f"checkpoint {target.uri(own.folder)}: {wrong[0]}")
    target.write(own.to_json(), own.folder, MARKER)


def _extra(fork: Fork) -> dict[str, Any]:
    """The parent's, without its history, and without its evaluation: that of other data or of
    another average would compete with the fork's own."""
    kept = {
        key: value
        for key, value in without_history(fork.commit.extra).items()
        if key not in (EVALUATION, EVALUATION_LOSS, FRESH_OPTIMIZER)
    }
    return {**kept, ATTEMPT: _FIRST, **({FRESH_OPTIMIZER: True} if fork.fresh_optimizer else {})}


def _copy_file(source: Storage, target: Storage, name: str) -> None:
    """Copies a file; on one disk of this machine both are the same, as neither ever changes."""
    if source.is_local and target.is_local:
        Path(target.path()).mkdir(parents=True, exist_ok=True)
        try:
            os.link(source.path(name), target.path(name))
            return
        except OSError:  # another disk, or one without links
            pass
    with source.open(name) as original, target.create(name) as copy:
        copyfileobj(original, copy)


def _name(run: Storage) -> str:
    return run.uri().rpartition("/")[2]


def _refuse(line: str) -> None:
    raise UserError(line)
