"""The weights that are exported or evaluated: a checkpoint's as trained, their average, or the mean
over several checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

from elastrata.checkpoints.commit import Commit, commits, problems
from elastrata.checkpoints.training_state import MODEL, load_full_model_state, part_is_saved
from elastrata.core.average import AVERAGE
from elastrata.run.history import read_lineage
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.storage import Storage

TRAINED = "trained"
_KINDS = (TRAINED, AVERAGE, "mean:5")
_MEAN = re.compile(r"mean:([1-9]\d{0,3})")


def read_weights(run: Storage, commit: Commit, wanted: str) -> dict[str, Tensor]:
    """The whole model of a checkpoint as plain tensors in main memory.

    Args:
        run: the run's folder.
        commit: one of its checkpoints.
        wanted: `trained`; `average`, the exponential one of the recipe's `average`; or `mean:K`, of
            the last K checkpoints there are up to this one (Izmailov et al., arXiv 1803.05407).

    Raises:
        UserError: there is no such choice, no average in the checkpoint, or too few checkpoints.
    """
    checkpoints = run.sub("checkpoints")
    if wanted == TRAINED:
        return load_full_model_state(checkpoints, commit)
    if wanted == AVERAGE:
        return _average(checkpoints, commit)
    if mean := _MEAN.fullmatch(wanted):
        return _mean(checkpoints, last_commits(run, commit, int(mean[1])))
    raise UserError(
        f"--weights: {wanted}: expected trained, average, or the mean of some checkpoints, such as "
        f"mean:5{nearest(wanted, _KINDS)}"
    )


def last_commits(run: Storage, commit: Commit, count: int) -> list[Commit]:
    """So many checkpoints that count, up to one of them, that one first.

    Raises:
        UserError: there are fewer, or one is damaged.
    """
    checkpoints, lineage = run.sub("checkpoints"), read_lineage(run.sub("history"))
    earlier = [
        other
        for other in commits(checkpoints)
        if other.step < commit.step and lineage.counts(*other.place)
    ]
    found = [commit, *sorted(earlier, key=lambda other: -other.step)]
    if len(found) < count:
        steps = ", ".join(str(one.step) for one in reversed(found))
        raise UserError(
            f"--weights: mean:{count}: expected at most mean:{len(found)}: up to step "
            f"{commit.step} there are the checkpoints of {steps}; checkpoint.keep_last keeps more"
        )
    for one in found[:count]:
        if damaged := problems(checkpoints, one):
            raise UserError(f"checkpoint {checkpoints.uri(one.folder)}: {damaged[0]}")
    return found[:count]


def _average(checkpoints: Storage, commit: Commit) -> dict[str, Tensor]:
    if not part_is_saved(checkpoints, commit, AVERAGE):
        raise UserError(
            f"--weights: {AVERAGE}: checkpoint {checkpoints.uri(commit.folder)} has none: expected "
            "a run whose recipe has the section average"
        )
    averages = load_full_model_state(checkpoints, commit, AVERAGE)
    return {**load_full_model_state(checkpoints, commit, MODEL), **averages}


def _mean(checkpoints: Storage, saved: Sequence[Commit]) -> dict[str, Tensor]:
    """The mean of all floating-point tensors, added up in fp64; the rest as in the first."""
    newest = load_full_model_state(checkpoints, saved[0])
    sums = {name: value.double() for name, value in newest.items() if value.is_floating_point()}
    for commit in saved[1:]:
        other = load_full_model_state(checkpoints, commit)
        for name, total in sums.items():
            total += other[name]
    means = {name: (total / len(saved)).to(newest[name].dtype) for name, total in sums.items()}
    return {**newest, **means}
