"""Forks: runs whose first checkpoint is another run's, and the steps that they inherit from it."""

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
    GIVEN_FILE,
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
from elastrata_pipelines.checked_json import describe_error
from elastrata_pipelines.errors import UserError, pluralize
from elastrata_pipelines.mixture import Mixture
from elastrata_pipelines.phase import compute_positions_after, placements
from elastrata_pipelines.storage import Storage

if TYPE_CHECKING:  # the recipe imports torch, for which `status` and `audit` need not wait
    from elastrata.recipe.recipe import Recipe

Entry = Mapping[str, Any]
Span = tuple[int, int]
"""First position in a data set and number of samples of a step."""
_FURTHEST = 2**62
"""Limit of positions, because arithmetic on them is done in 64 bits."""


@dataclass(frozen=True, kw_only=True)
class InheritedSteps:
    """The steps of a fork that its ancestors did."""

    state: Literal["none", "checked", "missing"] = "none"
    """`none`: it is not a fork. `missing`: the parent's folder is gone, so its data is
    unchecked."""
    text: str = ""
    """Why the parent is missing, for display."""
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    """Spans taken of each data set that the fork continues in the same order, by fingerprint."""
    problems: tuple[str, ...] = ()
    """One line for everything that changed since the fork began."""


def read_inherited_steps(
    origin: ForkOrigin | None, entries: Iterable[Entry], where: str
) -> InheritedSteps:
    """Return the steps before a fork, of all its ancestors.

    Args:
        origin: the fork's origin; None if the run is not a fork.
        entries: the fork's history.
        where: name of the fork in messages.

    Raises:
        UserError: the parent's history was altered and cannot be read.
    """
    if origin is None:
        return InheritedSteps()
    fork_entry = next((entry for entry in entries if entry["kind"] == FORKED), None)
    # The history and run.json name the parent independently, which reveals a swapped file.
    problems = (
        [] if fork_entry and fork_entry["sha256"] == origin.sha256 else [_parent_mismatch(where)]
    )
    parent = Storage(origin.url)
    identity = read_identity(parent)
    if identity is None:
        text = f"{origin.url}: the parent is missing"
        # Without the parent, trust the counts in run.json.
        spans = {key: [(0, count)] for key, count in origin.positions.items()}
        return InheritedSteps(state="missing", text=text, spans=spans, problems=tuple(problems))
    parent_entries = history.read_entries(parent.sub("history"))
    steps = [
        step for step in history.effective_steps(parent_entries) if step["step"] <= origin.step
    ]
    # The parent may have gone back behind the fork's step since.
    problems += _find_differences(parent, origin, steps)
    # The parent may be a fork itself.
    before = read_inherited_steps(identity.origin, parent_entries, parent.uri())
    spans = _collect_spans(parent, identity, steps, before, origin)
    problems += _find_gaps(spans, origin)
    return InheritedSteps(
        state=before.state if before.state == "missing" else "checked",
        text=before.text,
        spans=spans,
        problems=(*problems, *before.problems),
    )


@dataclass(frozen=True, kw_only=True)
class TakenSamples:
    """Samples that a step took of a data set, in the data set's order."""

    data_set: DataSet
    source: int | None
    """Its number in the step's mixture; None if the step has a single data set."""
    span: Span
    phase: PhaseSummary
    """The step's phase."""


def samples_by_step(
    steps: Sequence[Entry], phases: Sequence[PhaseSummary], identity: RunIdentity, where: str
) -> list[list[TakenSamples]]:
    """Return the samples that each step took of each data set.

    Args:
        steps: steps of a run.
        phases: the phases of its recipe.
        identity: its identity.
        where: name of the run in messages.

    Raises:
        UserError: the data sets or mixtures do not match the phases.
    """
    data, mixtures = _by_phase(phases, identity, where)
    sizes = [
        replace(phase.size, mixture=mixture)
        for phase, mixture in zip(phases, mixtures, strict=True)
    ]
    fork_origin = identity.origin
    origin = (
        fork_origin.placed({one: one.fingerprint for one in identity.data}) if fork_origin else None
    )
    places = list(placements(sizes, data, origin))
    taken_by_step = []
    for step in steps:
        # A step number beyond the last phase belongs to the last one.
        begun_phases = [n for n, place in enumerate(places) if place.first_step < step["step"]]
        number = begun_phases[-1] if begun_phases else 0
        first, count = span(step)
        # From samples of the whole run to positions in the phase's data.
        first += places[number].first_position - places[number].first_sample
        spans = _split_by_source(mixtures[number], places[number].firsts, (first, count))
        taken_by_step.append(
            [
                TakenSamples(data_set=data_set, source=source, span=one, phase=phases[number])
                for data_set, (source, one) in zip(data[number], spans, strict=True)
                # A source may contribute no sample to a step.
                if source is None or one[1]
            ]
        )
    return taken_by_step


def samples_after_step(
    step: int, phases: Sequence[PhaseSummary], identity: RunIdentity, run: Storage
) -> tuple[dict[str, PhaseSummary], dict[str, int]]:
    """Return the samples taken of each data set, by its fingerprint, with its last phase.

    Args:
        step: number of steps after which samples are counted.
        phases: the phases of the run's recipe.
        identity: the run's identity.
        run: the run's folder.

    Returns:
        The last phase that uses each data set, and the samples taken of each.

    Raises:
        UserError: see `samples_by_step`.
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
    return last, compute_positions_after(step, sizes, keys, place)


def _by_phase(
    phases: Sequence[PhaseSummary], identity: RunIdentity, where: str
) -> tuple[list[list[DataSet]], Sequence[Mixture | None]]:
    """Return the data sets and the mixture of each phase."""
    expected = sum(phase.num_data_sets for phase in phases)
    if len(identity.data) != expected:
        raise UserError(
            f"{where}: data: {len(identity.data)} data sets, but the run's recipe has "
            f"{expected} in {pluralize(len(phases), 'phase')}"
        )
    # `data` lists the data sets of all phases in one flat tuple.
    remaining_data = iter(identity.data)
    data = [[next(remaining_data) for _ in range(phase.num_data_sets)] for phase in phases]
    try:
        mixtures = mixtures_of(identity.mixtures, len(phases))
    except ValueError as error:
        raise UserError(f"{where}: mixtures: {error}") from None
    for number, (mixture, sets) in enumerate(zip(mixtures, data, strict=True)):
        if (mixture.num_sources if mixture else 1) != len(sets):
            raise UserError(
                f"{where}: mixtures.{number}: expected shares of {pluralize(len(sets), 'source')}"
            )
    return data, mixtures


def _split_by_source(
    mixture: Mixture | None, firsts: Sequence[int], taken_span: Span
) -> list[tuple[int | None, Span]]:
    """Return the samples of each source within a span of a phase."""
    if mixture is None:
        return [(None, taken_span)]
    first, count = taken_span
    if not 0 <= first < first + count < _FURTHEST:  # the audit reports such steps itself
        return [(number, (0, 0)) for number in range(mixture.num_sources)]
    before, after = mixture.counts(first), mixture.counts(first + count)
    return [
        (number, (begin + one, end - one))
        for number, (begin, one, end) in enumerate(zip(firsts, before, after, strict=True))
    ]


def span(step: Entry) -> Span:
    """Return the first position and the number of samples of a step."""
    return step["samples"] - step["batch_samples"], step["batch_samples"]


def _collect_spans(
    parent: Storage,
    identity: RunIdentity,
    steps: Sequence[Entry],
    before: InheritedSteps,
    origin: ForkOrigin,
) -> dict[str, list[Span]]:
    """Return the spans of a parent's own steps, after those that it inherited."""
    # Data sets that the fork reads in another order start anew and have no past.
    spans = {key: list(found) for key, found in before.spans.items() if key in origin.positions}
    phases, where = read_summary(parent).phases, parent.uri(RUN_FILE)
    for parts in samples_by_step(steps, phases, identity, where):
        for one in parts:
            if one.data_set.fingerprint in origin.positions:
                spans.setdefault(one.data_set.fingerprint, []).append(one.span)
    return spans


def _find_differences(parent: Storage, origin: ForkOrigin, steps: Sequence[Entry]) -> list[str]:
    """Return one line for each contradiction between the parent's history and the origin."""
    problems = []
    last = steps[-1] if steps else {"step": 0, "samples": 0}
    if (last["step"], last["samples"]) != (origin.step, origin.samples):
        problems.append(
            f"{parent.uri('history')}: {pluralize(last['samples'], 'sample')} after step "
            f"{last['step']}, but "
            f"the fork starts after step {origin.step} with {origin.samples:,}"
        )
    return problems


def _find_gaps(spans: Mapping[str, Sequence[Span]], origin: ForkOrigin) -> list[str]:
    """Return one line for each data set of which the ancestors took another number of samples."""
    num_taken = {key: sum(count for _, count in spans.get(key, ())) for key in origin.positions}
    return [
        f"{origin.url}: {pluralize(num_taken[key], 'sample')} of the data set {key[:12]} were "
        "taken, but the "
        f"fork continues after {count:,}"
        for key, count in origin.positions.items()
        if num_taken[key] != count
    ]


def _parent_mismatch(where: str) -> str:
    """Return the message about a fork whose history does not name its parent."""
    return f"{where}: its history does not begin with the parent that run.json names"


_FIRST = 1
"""Attempt number of a fork's beginning, in which no step is done."""


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A run to be begun from another run's checkpoint."""

    run: Storage
    """Its folder, still empty."""
    recipe: Recipe
    data: tuple[DataSet, ...]
    """The data set of every phase."""
    parent: Storage
    commit: Commit
    """The parent's checkpoint."""
    positions: Mapping[str, int]
    """See `ForkOrigin.positions`."""
    fresh_optimizer: bool
    """Whether to begin without the parent's optimizer state."""
    mixtures: Mixtures | None = None
    """See `RunIdentity.mixtures`."""

    @property
    def origin(self) -> ForkOrigin:
        """The location and checksum of the parent's checkpoint."""
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

    If it fails, nothing is left in the folder.

    Raises:
        UserError: the parent's checkpoint is gone, the folder is in use or not empty, or it cannot
            be written.
    """
    try:
        with claim(fork.run, "run", lost=_raise_user_error):
            if folder_kind(fork.run) != "nothing":
                raise UserError(f"{fork.run.uri()}: another command has just created it")
            try:
                _write(fork)
            except BaseException:
                # run.json is the last file, so it cannot exist here.
                for name in ("checkpoints", "history", RECIPE_FILE, GIVEN_FILE):
                    fork.run.delete(name)
                raise
    except OSError as error:
        raise UserError(f"{fork.run.uri()}: cannot be created ({describe_error(error)})") from None


def _write(fork: Fork) -> None:
    """Write the fork's checkpoint, history, recipe and identity."""
    origin = fork.origin
    # A parent that died may have left lines in the commit only; write them, as the audit of the
    # fork reads the parent's history. A live parent writes its own.
    if owner_is_alive(fork.parent) is False:
        restore_history(fork.parent.sub("history"), fork.commit)
    _copy_commit(fork)
    writer = HistoryWriter(fork.run.sub("history"), _FIRST, _raise_user_error, writer="d")
    writer.add(FORKED, _fork_entry(origin))
    writer.flush()
    # run.json comes last: a run begins to exist with it.
    write_identity(
        fork.run,
        RunIdentity(
            name=_run_name(fork.run), data=fork.data, origin=origin, mixtures=fork.mixtures
        ),
        fork.recipe,
    )


def _fork_entry(origin: ForkOrigin) -> dict[str, Any]:
    values = origin.model_dump(mode="json", exclude={"url", "positions"})
    return {"parent": origin.url, **values}


def _copy_commit(fork: Fork) -> None:
    """Copy the parent's checkpoint as a checkpoint of the fork's first attempt."""
    source, target = fork.parent.sub("checkpoints"), fork.run.sub("checkpoints")
    token = fork.commit.folder.rpartition("-")[2]
    own = fork.commit.model_copy(
        update={
            "folder": str(FolderName(_FIRST, fork.commit.step, token)),
            "extra": _fork_extra(fork),
        }
    )
    for name in own.files:
        _copy_file(source.sub(fork.commit.folder), target.sub(own.folder), name)
    if wrong := size_problems(target, own):
        raise UserError(f"checkpoint {target.uri(own.folder)}: {wrong[0]}")
    # The marker comes last: it makes the checkpoint exist.
    target.write(own.to_json(), own.folder, MARKER)


def _fork_extra(fork: Fork) -> dict[str, Any]:
    """Return the checkpoint's `extra` without the parent's history and evaluation."""
    # The evaluation is of other data or of another average, and would compete with the fork's own
    # ones for `best`.
    inherited_extra = {
        key: value
        for key, value in without_history(fork.commit.extra).items()
        if key not in (EVALUATION, EVALUATION_LOSS, FRESH_OPTIMIZER)
    }
    return {
        **inherited_extra,
        ATTEMPT: _FIRST,
        **({FRESH_OPTIMIZER: True} if fork.fresh_optimizer else {}),
    }


def _copy_file(source: Storage, target: Storage, name: str) -> None:
    """Copy a file, or link it if source and target are on one local disk."""
    if source.is_local and target.is_local:
        Path(target.path()).mkdir(parents=True, exist_ok=True)
        try:
            # Safe, because files of checkpoints never change; saves time and disk space.
            os.link(source.path(name), target.path(name))
            return
        except OSError:  # another disk, or a file system without links
            pass
    with source.open(name) as original, target.create(name) as copy:
        copyfileobj(original, copy)


def _run_name(run: Storage) -> str:
    return run.uri().rpartition("/")[2]


def _raise_user_error(line: str) -> None:
    """Raise a `UserError` with a line."""
    raise UserError(line)
