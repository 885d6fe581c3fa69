"""The fork of a run: a folder whose first checkpoint is one of another run's, and the steps that it
has from that one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import copyfileobj
from typing import TYPE_CHECKING, Any, Literal

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
from elastrata.run import history
from elastrata.run.claim import claim, folder_kind
from elastrata.run.folder import (
    RECIPE_FILE,
    RUN_FILE,
    DataSet,
    ForkOrigin,
    Mixtures,
    PhaseSummary,
    RunIdentity,
    mixtures_of,
    read_identity,
    read_summary,
    write_identity,
)
from elastrata.run.history import FORKED, HistoryWriter, restore_history, without_history
from elastrata.run.ownership import owner_is_alive
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.mixture import Mixture
from elastrata_pipelines.phase import placements, positions_after
from elastrata_pipelines.storage import Storage

if TYPE_CHECKING:  # it imports torch, which `status` and `audit` need not wait for
    from elastrata.recipe.recipe import Recipe

Entry = Mapping[str, Any]
Span = tuple[int, int]
"""First position in a data set and number of samples of a step."""
_FURTHEST = 2**62
"""No position is beyond: arithmetic on positions is done in 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Inherited:
    """The part of a fork's steps that others have done."""

    state: Literal["none", "checked", "missing"] = "none"
    """none: it is no fork. missing: the parent is not there, and is taken at its word."""
    text: str = ""
    """Why it is missing, for people."""
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    """By the fingerprint of each data set that the fork reads on in the same order."""
    problems: tuple[str, ...] = ()
    """A line for everything that is not as it was when the fork began."""


def inherited(origin: ForkOrigin | None, entries: Iterable[Entry], where: str) -> Inherited:
    """The steps before a fork, of all its ancestors.

    Args:
        origin: of the fork; None: it is none.
        entries: of the fork's history.
        where: what to call the fork.

    Raises:
        UserError: the parent's history was altered so that it cannot be read.
    """
    if origin is None:
        return Inherited()
    told = next((entry for entry in entries if entry["kind"] == FORKED), None)
    problems = [] if told and told["sha256"] == origin.sha256 else [_untold(where)]
    parent = Storage(origin.url)
    identity = read_identity(parent)
    if identity is None:
        text = f"{origin.url}: the parent is not there"
        spans = {key: [(0, count)] for key, count in origin.positions.items()}
        return Inherited(state="missing", text=text, spans=spans, problems=tuple(problems))
    past = history.read(parent.sub("history"))
    steps = [step for step in history.effective_steps(past) if step["step"] <= origin.step]
    problems += _differences(parent, origin, steps)
    before = inherited(identity.origin, past, parent.uri())
    spans = _spans(parent, identity, steps, before, origin)
    problems += _gaps(spans, origin)
    return Inherited(
        state=before.state if before.state == "missing" else "checked",
        text=before.text,
        spans=spans,
        problems=(*problems, *before.problems),
    )


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Samples that a step took of a data set, in the order of that one."""

    data_set: DataSet
    source: int | None
    """Its number in the step's mixture; None: the step has this data set alone."""
    span: Span
    phase: PhaseSummary
    """That of the step."""


def taken_by(
    steps: Sequence[Entry], phases: Sequence[PhaseSummary], identity: RunIdentity, where: str
) -> list[list[Taken]]:
    """What each step took of each data set.

    Args:
        steps: of a run.
        phases: of its recipe.
        identity: its own.
        where: what to call it.

    Raises:
        UserError: its data sets or mixtures are not those of so many phases.
    """
    data, mixtures = _by_phase(phases, identity, where)
    sizes = [
        replace(phase.size, mixture=mixture)
        for phase, mixture in zip(phases, mixtures, strict=True)
    ]
    known = identity.origin
    origin = known.placed({one: one.fingerprint for one in identity.data}) if known else None
    places = list(placements(sizes, data, origin))
    taken = []
    for step in steps:
        reached = [n for n, place in enumerate(places) if place.first_step < step["step"]]
        number = reached[-1] if reached else 0
        first, count = span(step)
        first += places[number].first_position - places[number].first_sample
        spans = _spans_of(mixtures[number], places[number].firsts, (first, count))
        taken.append(
            [
                Taken(data_set=data_set, source=source, span=one, phase=phases[number])
                for data_set, (source, one) in zip(data[number], spans, strict=True)
                if source is None or one[1]
            ]
        )
    return taken


def taken_after(
    step: int, phases: Sequence[PhaseSummary], identity: RunIdentity, run: Storage
) -> tuple[dict[str, PhaseSummary], dict[str, int]]:
    """By the fingerprint of each data set of a run, the last phase that has it, and the samples
    taken of it after so many steps.

    Raises:
        UserError: as `taken_by`.
    """
    data, mixtures = _by_phase(phases, identity, run.uri(RUN_FILE))
    keys = [[one.fingerprint for one in sets] for sets in data]
    sizes = [
        replace(phase.size, mixture=mixture)
        for phase, mixture in zip(phases, mixtures, strict=True)
    ]
    origin = identity.origin
    place = origin.placed({key: key for one in keys for key in one}) if origin else None
    last = {key: phase for one, phase in zip(keys, phases, strict=True) for key in one}
    return last, positions_after(step, sizes, keys, place)


def _by_phase(
    phases: Sequence[PhaseSummary], identity: RunIdentity, where: str
) -> tuple[list[list[DataSet]], Sequence[Mixture | None]]:
    """The data sets and the mixture of each phase."""
    expected = sum(phase.num_data_sets for phase in phases)
    if len(identity.data) != expected:
        raise UserError(
            f"{where}: data: {len(identity.data)} data sets, but the run's recipe has "
            f"{expected} in {len(phases)} phases"
        )
    left = iter(identity.data)
    data = [[next(left) for _ in range(phase.num_data_sets)] for phase in phases]
    try:
        mixtures = mixtures_of(identity.mixtures, len(phases))
    except ValueError as error:
        raise UserError(f"{where}: mixtures: {error}") from None
    for number, (mixture, sets) in enumerate(zip(mixtures, data, strict=True)):
        if (mixture.num_sources if mixture else 1) != len(sets):
            raise UserError(f"{where}: mixtures.{number}: expected shares of {len(sets)} sources")
    return data, mixtures


def _spans_of(
    mixture: Mixture | None, firsts: Sequence[int], taken: Span
) -> list[tuple[int | None, Span]]:
    """The samples of each source in a span of a phase."""
    if mixture is None:
        return [(None, taken)]
    first, count = taken
    if not 0 <= first < first + count < _FURTHEST:  # has been reported already
        return [(number, (0, 0)) for number in range(mixture.num_sources)]
    before, after = mixture.counts(first), mixture.counts(first + count)
    return [
        (number, (begin + one, end - one))
        for number, (begin, one, end) in enumerate(zip(firsts, before, after, strict=True))
    ]


def span(step: Entry) -> Span:
    """First position and number of samples of a step."""
    return step["samples"] - step["batch_samples"], step["batch_samples"]


def _spans(
    parent: Storage,
    identity: RunIdentity,
    steps: Sequence[Entry],
    before: Inherited,
    origin: ForkOrigin,
) -> dict[str, list[Span]]:
    """The spans of a parent, after those of its own."""
    spans = {key: list(found) for key, found in before.spans.items() if key in origin.positions}
    phases, where = read_summary(parent).phases, parent.uri(RUN_FILE)
    for taken in taken_by(steps, phases, identity, where):
        for one in taken:
            if one.data_set.fingerprint in origin.positions:
                spans.setdefault(one.data_set.fingerprint, []).append(one.span)
    return spans


def _differences(parent: Storage, origin: ForkOrigin, steps: Sequence[Entry]) -> list[str]:
    """A line for each thing that the parent's history has otherwise."""
    problems = []
    last = steps[-1] if steps else {"step": 0, "samples": 0}
    if (last["step"], last["samples"]) != (origin.step, origin.samples):
        problems.append(
            f"{parent.uri('history')}: {last['samples']:,} samples after step {last['step']}, but "
            f"the fork goes on after step {origin.step} with {origin.samples:,}"
        )
    return problems


def _gaps(spans: Mapping[str, Sequence[Span]], origin: ForkOrigin) -> list[str]:
    """A line for each data set of which the ancestors took more or fewer samples than the fork
    says."""
    taken = {key: sum(count for _, count in spans.get(key, ())) for key in origin.positions}
    return [
        f"{origin.url}: {taken[key]:,} samples of the data set {key[:12]} were taken, but the fork "
        f"goes on behind {count:,}"
        for key, count in origin.positions.items()
        if taken[key] != count
    ]


def _untold(where: str) -> str:
    return f"{where}: its history does not begin with the parent that run.json names"


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
