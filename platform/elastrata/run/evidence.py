"""The evidence of a run: its history and its checkpoints, held against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastrata.checkpoints.commit import Commit, markers, size_problems
from elastrata.run import history
from elastrata.run.history import History
from elastrata.run.lineage import Lineage
from elastrata.run.parts import part_names
from elastrata.run.succession import head
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

FROM = "elastrata train ... --from"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The files of a run, as far as a look at names, sizes and checksums of lines tells."""

    run: Storage
    history: History
    saved: tuple[Commit, ...]
    """Checkpoints with a readable marker, the newest first."""
    lineage: Lineage
    unreadable: tuple[str, ...]
    """A line for each checkpoint whose marker is damaged."""

    @property
    def problems(self) -> tuple[str, ...]:
        """A line for each thing that is not as it was written."""
        return (*self.history.chain.problems, *self.unreadable)

    @property
    def counting(self) -> list[Commit]:
        """The checkpoints that the run has not gone back behind, the newest first."""
        return [commit for commit in self.saved if self.lineage.counts(*commit.place)]


def evidence(run: Storage) -> Evidence:
    """Looks at a run's folder.

    Raises:
        UserError: its history was altered so that it cannot be read.
    """
    checkpoints = run.sub("checkpoints")
    marked = markers(checkpoints)  # before the history: what they know of it is there by then
    saved = tuple(one for one in marked.values() if isinstance(one, Commit))
    heads = [(f"checkpoint {commit.folder}", link) for commit in saved if (link := head(commit))]
    found = history.look(run.sub("history"), heads)
    lineage = Lineage()
    for entry in found.entries:
        lineage.event(entry)
    return Evidence(
        run=run,
        history=found,
        saved=saved,
        lineage=lineage,
        unreadable=tuple(
            f"checkpoint {checkpoints.uri(folder)}: {why}"
            for folder, why in marked.items()
            if isinstance(why, str)
        ),
    )


def is_begun(run: Storage) -> bool:
    """Whether workers have left something in a run's folder."""
    names = part_names(run.sub("history"))
    return bool(markers(run.sub("checkpoints"))) or any(not name.writer for name in names)


def check_continuation(run: Storage, warn: Callable[[str], None]) -> None:
    """Looks whether a run can go on by itself. Writes nothing.

    Args:
        run: its folder.
        warn: called with a line for each thing that is not as it was written and does not hinder.

    Raises:
        UserError: its history cannot be read, holds what does not belong to it, or contradicts all
            checkpoints; or no checkpoint is whole. A run that has checkpoints never begins anew.
    """
    found = evidence(run)
    where = run.sub("history").uri()
    if foreign := found.history.chain.foreign:
        lines = [
            f"{where}/{name}: not in the chain: {why}" for name, why in sorted(foreign.items())
        ]
        raise UserError(*(f"{line}; {_advice(found.saved)}" for line in lines))
    if found.saved and not found.counting:
        raise UserError(*contradictions(run, found.saved, found.lineage))
    for line in found.problems:
        warn(line)
    start = _start(found)
    steps = history.effective_steps(found.history.entries)
    if steps and steps[-1]["step"] > start:
        first = (
            f"from step {start + 1}" if start else "from the first step, as no checkpoint is there"
        )
        warn(f"goes on {first}; the history has steps up to {steps[-1]['step']}")


def contradictions(
    run: Storage, saved: tuple[Commit, ...] | list[Commit], lineage: Lineage
) -> list[str]:
    """Why none of a run's checkpoints counts, a line for each."""
    return [
        f"checkpoint {run.uri('checkpoints', commit.folder)}: does not count: by the history "
        f"attempt {event.attempt} went on from step {event.step}, and no checkpoint of that is "
        f"left; {FROM} {commit.step} goes on from this one"
        for commit in saved
        if (event := lineage.contradiction(*commit.place))
    ]


def _start(found: Evidence) -> int:
    """The step of the newest checkpoint that looks whole; 0: there is none at all.

    Raises:
        UserError: there are some, but none is whole.
    """
    checkpoints = found.run.sub("checkpoints")
    damaged = []
    for commit in found.counting:
        wrong = size_problems(checkpoints, commit)
        if not wrong:
            return commit.step
        damaged.append(f"checkpoint {checkpoints.uri(commit.folder)}: {wrong[0]}")
    if damaged or found.unreadable:
        raise UserError(*damaged, *found.unreadable)
    return 0


def _advice(saved: tuple[Commit, ...]) -> str:
    if not saved:
        return "move it away"
    return f"move it away, or {FROM} {saved[0].step} goes on from that checkpoint without it"
