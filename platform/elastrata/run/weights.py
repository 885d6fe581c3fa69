"""The weights that are exported or evaluated: a checkpoint's as trained, their average, or the mean
over several checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from typing_extensions import override

from elastrata.checkpoints.commit import Commit, commits, problems
from elastrata.checkpoints.state import ModelTensors
from elastrata.run.history import read_lineage
from elastrata.step.average import AVERAGE
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.storage import Storage

TRAINED = "trained"
_KINDS = (TRAINED, AVERAGE, "mean:5")
_MEAN = re.compile(r"mean:([1-9]\d{0,3})")


def read_weights(run: Storage, commit: Commit, wanted: str) -> Mapping[str, Tensor]:
    """The model of a checkpoint as plain tensors, each read, or averaged, when it is asked for.

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
        return ModelTensors(checkpoints, commit)
    if wanted == AVERAGE:
        return _average(checkpoints, commit)
    if mean := _MEAN.fullmatch(wanted):
        saved = last_commits(run, commit, int(mean[1]))
        return _Mean([ModelTensors(checkpoints, one) for one in saved])
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


def _average(checkpoints: Storage, commit: Commit) -> Mapping[str, Tensor]:
    averages = ModelTensors(checkpoints, commit, AVERAGE)
    if not averages:
        raise UserError(
            f"--weights: {AVERAGE}: checkpoint {checkpoints.uri(commit.folder)} has none: expected "
            "a run whose recipe has the section average"
        )
    return _Averaged(averages, ModelTensors(checkpoints, commit))


class _Averaged(Mapping[str, Tensor]):
    """The averages of a model's tensors; of those that have none, the tensors themselves."""

    def __init__(self, averages: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
        self._averages, self._model = averages, model

    @override
    def __getitem__(self, name: str) -> Tensor:
        return (self._averages if name in self._averages else self._model)[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._model)

    @override
    def __len__(self) -> int:
        return len(self._model)


class _Mean(Mapping[str, Tensor]):
    """The mean of each floating-point tensor of some models, added up in fp64; the rest as in the
    first."""

    def __init__(self, models: Sequence[Mapping[str, Tensor]]) -> None:
        self._models = models

    @override
    def __getitem__(self, name: str) -> Tensor:
        first, *others = self._models
        newest = first[name]
        if not newest.is_floating_point():
            return newest
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
