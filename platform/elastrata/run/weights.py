"""Weights to export or evaluate: a checkpoint's own, its average, or a mean of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from typing_extensions import override

from elastrata.checkpoints.commit import Commit, file_problems, list_commits
from elastrata.checkpoints.state import ModelTensors
from elastrata.run.history import read_lineage
from elastrata.step.average import AVERAGE
from elastrata_pipelines.errors import UserError, suggest_nearest
from elastrata_pipelines.storage import Storage

TRAINED = "trained"
_KINDS = (TRAINED, AVERAGE, "mean:5")
_MEAN = re.compile(r"mean:([1-9]\d{0,3})")


def read_weights(run: Storage, commit: Commit, wanted: str) -> Mapping[str, Tensor]:
    """Return the model of a checkpoint as plain tensors, which are read lazily.

    Args:
        run: the run's folder.
        commit: one of its checkpoints.
        wanted: `trained`; `average`, the exponential average of the recipe's `average`; or
            `mean:K`, the mean of the last K checkpoints up to this one (Izmailov et al., arXiv
            1803.05407).

    Raises:
        UserError: the choice is invalid, the checkpoint has no average, or there are too few
            checkpoints.
    """
    checkpoints = run.sub("checkpoints")
    if wanted == TRAINED:
        return ModelTensors(checkpoints, commit)
    if wanted == AVERAGE:
        return _average(checkpoints, commit)
    if mean := _MEAN.fullmatch(wanted):
        saved = last_commits(run, commit, int(mean[1]))
        return _MeanModel([ModelTensors(checkpoints, one) for one in saved])
    raise UserError(
        f"--weights: {wanted}: expected trained, average, or the mean of checkpoints, such as "
        f"mean:5{suggest_nearest(wanted, _KINDS)}"
    )


def last_commits(run: Storage, commit: Commit, count: int) -> list[Commit]:
    """Return the last `count` checkpoints up to and including `commit`, newest first.

    Raises:
        UserError: there are fewer, or one is damaged.
    """
    checkpoints, lineage = run.sub("checkpoints"), read_lineage(run.sub("history"))
    earlier = [
        other
        for other in list_commits(checkpoints)
        # Checkpoints that were rolled back are of another trajectory.
        if other.step < commit.step and lineage.counts(*other.place)
    ]
    candidates = [commit, *sorted(earlier, key=lambda other: -other.step)]
    # `checkpoint.keep_last` limits how many are stored.
    if len(candidates) < count:
        steps = ", ".join(str(one.step) for one in reversed(candidates))
        raise UserError(
            f"--weights: mean:{count}: expected at most mean:{len(candidates)}: up to step "
            f"{commit.step} there are the checkpoints of {steps}; checkpoint.keep_last keeps more"
        )
    for one in candidates[:count]:
        if damaged := file_problems(checkpoints, one):
            raise UserError(f"checkpoint {checkpoints.uri(one.folder)}: {damaged[0]}")
    return candidates[:count]


def _average(checkpoints: Storage, commit: Commit) -> Mapping[str, Tensor]:
    """Return the averaged weights of a checkpoint."""
    averages = ModelTensors(checkpoints, commit, AVERAGE)
    if not averages:
        raise UserError(
            f"--weights: {AVERAGE}: checkpoint {checkpoints.uri(commit.folder)} has none: expected "
            "a run whose recipe has the section average"
        )
    return _AveragedModel(averages, ModelTensors(checkpoints, commit))


class _AveragedModel(Mapping[str, Tensor]):
    """The averages of a model's tensors; tensors without an average are returned as they are."""

    def __init__(self, averages: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
        self._averages, self._model = averages, model

    @override
    def __getitem__(self, name: str) -> Tensor:
        return (self._averages if name in self._averages else self._model)[name]

    @override
    def __iter__(self) -> Iterator[str]:
        # All names of the model: an average exists only of some tensors.
        return iter(self._model)

    @override
    def __len__(self) -> int:
        return len(self._model)


class _MeanModel(Mapping[str, Tensor]):
    """The mean of floating-point tensors over several models; other tensors are the first's."""

    def __init__(self, models: Sequence[Mapping[str, Tensor]]) -> None:
        self._models = models

    @override
    def __getitem__(self, name: str) -> Tensor:
        first, *others = self._models
        newest = first[name]
        # Integer buffers cannot be averaged: take the newest checkpoint's.
        if not newest.is_floating_point():
            return newest
        # Added up in fp64, to avoid rounding errors in the sum.
        total = newest.double()
        for model in others:
            total += model[name]
        return (total / len(self._models)).to(newest.dtype)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._models[0])

    @override
    def __len__(self) -> int:
        return len(self._models[0])
