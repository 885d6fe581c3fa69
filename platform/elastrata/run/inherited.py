"""The steps that a fork has from its parent: whether they are there, and the samples in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from elastrata.run import history
from elastrata.run.folder import DataSet, RunIdentity, read_identity
from elastrata.run.fork_origin import ForkOrigin
from elastrata.run.parts import Link, PartName, part_names, read_part
from elastrata.run.summary import PhaseSummary, read_summary
from elastrata_pipelines.phase import placements
from elastrata_pipelines.storage import Storage

Entry = Mapping[str, Any]
Span = tuple[int, int]
"""First position in a data set and number of samples of a step."""
FORKED = "forked"
"""The entry of a fork's history that names its parent, and the parent's history by then."""


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
    problems += _differences(parent, origin, steps, told)
    before = inherited(identity.origin, past, parent.uri())
    spans = _spans(parent, identity, steps, before, origin)
    problems += _gaps(spans, origin)
    return Inherited(
        state=before.state if before.state == "missing" else "checked",
        text=before.text,
        spans=spans,
        problems=(*problems, *before.problems),
    )


def by_data_set(
    steps: Sequence[Entry], phases: Sequence[PhaseSummary], identity: RunIdentity
) -> dict[DataSet, list[Entry]]:
    """The steps of the phases on each data set, their samples counted from the first of it."""
    data, origin = identity.data, identity.origin
    placed: dict[DataSet, list[Entry]] = {data_set: [] for data_set in data}
    known = origin.placed({one: one.fingerprint for one in data}) if origin else None
    places = list(placements([phase.size for phase in phases], data, known))
    for step in steps:
        reached = [n for n, place in enumerate(places) if place.first_step < step["step"]]
        number = reached[-1] if reached else 0
        shift = places[number].first_sample - places[number].first_position
        placed[data[number]].append({**step, "samples": step["samples"] - shift})
    return placed


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
    for data_set, placed in by_data_set(steps, read_summary(parent).phases, identity).items():
        if data_set.fingerprint in origin.positions:
            spans.setdefault(data_set.fingerprint, []).extend(map(span, placed))
    return spans


def _differences(
    parent: Storage, origin: ForkOrigin, steps: Sequence[Entry], told: Entry | None
) -> list[str]:
    """A line for each thing that the parent's history has otherwise."""
    problems = []
    last = steps[-1] if steps else {"step": 0, "samples": 0}
    if (last["step"], last["samples"]) != (origin.step, origin.samples):
        problems.append(
            f"{parent.uri('history')}: {last['samples']:,} samples after step {last['step']}, but "
            f"the fork goes on after step {origin.step} with {origin.samples:,}"
        )
    if told and told.get("head") and not _is_there(parent, Link.model_validate(told["head"])):
        problems.append(
            f"{parent.uri('history', told['head']['part'])}: missing or altered: the fork goes on "
            "after it"
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


def _is_there(parent: Storage, link: Link) -> bool:
    storage, name = parent.sub("history"), PartName.parse(link.part)
    if name is None or name not in part_names(storage):
        return False
    return read_part(storage, name).holds(link)


def _untold(where: str) -> str:
    return f"{where}: its history does not begin with the parent that run.json names"
