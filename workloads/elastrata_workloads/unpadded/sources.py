"""The losses of a mixture's sources, each over its own predictions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elastrata.core.workload import SOURCE_LOSS, Metric
from elastrata_pipelines.rows import Rows


def sources_of(rows: Rows, predicted: npt.NDArray[np.int64]) -> Tensor | None:
    """The number of the source of every prediction, shape [P]; None where there is no mixture.

    Args:
        rows: the samples.
        predicted: indices into their tokens.
    """
    if rows.sources is None:
        return None
    return torch.from_numpy(np.repeat(rows.sources, rows.lengths)[predicted].astype(np.int64))


def source_weights(rows: Rows, sources: Tensor | None) -> dict[str, float]:
    """The predictions of each source, by the name of its loss."""
    count = len(rows.source_names)
    if not count:
        return {}
    numbers = torch.zeros(0, dtype=torch.int64) if sources is None else sources
    counted = torch.bincount(numbers, minlength=count).tolist()
    return {
        SOURCE_LOSS + name: float(number)
        for name, number in zip(rows.source_names, counted, strict=True)
    }


def source_losses(
    each: Tensor | None, sources: Tensor | None, names: tuple[str, ...]
) -> dict[str, Metric]:
    """The loss of each source; none where there is no mixture.

    Args:
        each: loss of every prediction, shape [P].
        sources: numbers of their sources, shape [P].
        names: of all sources.
    """
    if each is None or sources is None:
        return {}
    sums = torch.zeros(len(names), dtype=torch.float64, device=each.device)
    sums.index_add_(0, sources, each.double())
    return {
        SOURCE_LOSS + name: Metric(total, per=SOURCE_LOSS + name)
        for name, total in zip(names, sums.unbind(), strict=True)
    }
