"""A micro-batch without padding: samples end to end, where attention stops, and what is to be
predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from elastrata.workload.batch import Batch
from elastrata.workload.workload import SOURCE_LOSS, Metric
from elastrata_pipelines.rows import Rows

FILLER_TOKENS = 2
"""Tokens of the micro-batch without samples. Not 1: torch.compile would compile every block once
more for a dimension of size 1."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Where attention stops: a segment is a sample, or one document of a packed sample."""

    offsets: Tensor
    """Shape [G + 1], int32, on the model's device: starts of the segments, then T."""
    lengths: tuple[int, ...]
    """G lengths, known to the host without asking the device."""
    longest: int
    """No segment is longer. Rounded up, so that compiled blocks see few different numbers."""


@dataclass(frozen=True, kw_only=True)
class UnpaddedBatch(Batch):
    """N samples of T tokens in G segments, with P tokens to predict.

    A micro-batch without samples holds one segment of padding tokens with nothing to predict: the
    model runs as ever, so that collectives match, and all sums and gradients are zero.
    """

    input_ids: Tensor
    """Shape [T], int64: what the model sees."""
    positions: Tensor
    """Shape [T], int64: place of each token in its segment."""
    offsets: Tensor
    """Shape [G + 1], int32: starts of the segments, then T."""
    segment_lengths: tuple[int, ...]
    """G lengths."""
    predicted: Tensor
    """Shape [P], int64: indices into the T tokens, ascending: where the model predicts."""
    targets: Tensor
    """Shape [P], int64: what it is to predict there."""
    dropout_keys: Tensor | None
    """With dropout only, shape [T], int64: a hash of (seed, epoch, sample, token)."""
    sources: Tensor | None = None
    """Of a mixture only, shape [P], int64: the number of each prediction's source."""
    source_names: tuple[str, ...] = ()
    """Of a mixture only: those of all its sources, by number."""

    def filled(self, multiple: int) -> Self:
        """This batch with tokens up to a multiple of that number: a segment of their own, with
        nothing to predict, so that no sum and no gradient changes."""
        return self.filled_to(len(self.input_ids) + -len(self.input_ids) % multiple)

    def filled_to(self, num_tokens: int) -> Self:
        """This batch with so many tokens, filled up likewise."""
        missing = num_tokens - len(self.input_ids)
        if not missing:
            return self
        per_token: dict[str, Any] = {
            name: F.pad(value, (0, missing))
            for name in self._per_token
            if (value := getattr(self, name)) is not None
        }
        return replace(
            self,
            **per_token,
            num_positions=num_tokens,
            offsets=F.pad(self.offsets, (0, 1), value=len(self.input_ids) + missing),
            segment_lengths=(*self.segment_lengths, missing),
        )

    @property
    def _per_token(self) -> tuple[str, ...]:
        """Names of the tensors of shape [T]."""
        return ("input_ids", "positions", "dropout_keys")

    @property
    def segments(self) -> Segments:
        """The segments, as attention needs them."""
        longest = max(self.segment_lengths)
        return Segments(self.offsets, self.segment_lengths, longest=1 << (longest - 1).bit_length())


def unpadded(
    rows: Rows,
    *,
    tokens: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64],
    dropout_keys: npt.NDArray[np.uint64] | None,
    terms: Sequence[str],
) -> UnpaddedBatch:
    """The micro-batch of samples; positions start anew in every document of a packed one.

    Args:
        rows: the samples, of T tokens in all.
        tokens: what the model sees of them, shape [T].
        predicted: indices into them, ascending, shape [P].
        targets: what stands there, shape [P].
        dropout_keys: shape [T]; None: nothing is dropped.
        terms: of the loss; every prediction counts in each.
    """
    starts, lengths = rows.segment_starts, rows.segment_lengths
    sources = sources_of(rows, predicted)
    keys = None if dropout_keys is None else torch.from_numpy(dropout_keys.view(np.int64))
    return UnpaddedBatch(
        weights=dict.fromkeys(terms, float(len(predicted))) | source_weights(rows, sources),
        num_positions=len(tokens),
        input_ids=torch.from_numpy(tokens),
        positions=torch.from_numpy(np.arange(len(tokens)) - np.repeat(starts, lengths)),
        offsets=torch.from_numpy(np.append(starts, len(tokens)).astype(np.int32)),
        segment_lengths=tuple(lengths.tolist()),
        predicted=torch.from_numpy(predicted),
        targets=torch.from_numpy(targets),
        dropout_keys=keys,
        sources=sources,
        source_names=rows.source_names,
    )


def filler(rows: Rows, *, pad_id: int, dropout: bool, terms: Sequence[str]) -> UnpaddedBatch:
    """The micro-batch without samples."""
    zeros = torch.zeros(FILLER_TOKENS, dtype=torch.int64)
    return UnpaddedBatch(
        weights=dict.fromkeys(terms, 0.0) | source_weights(rows, None),
        num_positions=FILLER_TOKENS,
        input_ids=torch.full_like(zeros, pad_id),
        positions=torch.arange(FILLER_TOKENS),
        offsets=torch.tensor([0, FILLER_TOKENS], dtype=torch.int32),
        segment_lengths=(FILLER_TOKENS,),
        predicted=zeros[:0],
        targets=zeros[:0],
        dropout_keys=zeros if dropout else None,
        sources=zeros[:0] if rows.source_names else None,
        source_names=rows.source_names,
    )


def equally_long(batches: Sequence[Batch], multiple: int) -> list[Batch]:
    """These micro-batches, all with as many tokens as the longest one, up to a multiple of
    `multiple`.

    Raises:
        TypeError: they are of another kind.
    """
    unpadded = [batch for batch in batches if isinstance(batch, UnpaddedBatch)]
    if len(unpadded) < len(batches):
        raise TypeError("expected UnpaddedBatch")
    longest = max(len(batch.input_ids) for batch in unpadded)
    return [batch.filled_to(longest + -longest % multiple) for batch in unpadded]


def sources_of(rows: Rows, predicted: npt.NDArray[np.int64]) -> Tensor | None:
    """The number of the source of every prediction, shape [P]; None where there is no mixture."""
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
    """The loss of each source; none where there is no mixture."""
    if each is None or sources is None:
        return {}
    sums = torch.zeros(len(names), dtype=torch.float64, device=each.device)
    sums.index_add_(0, sources, each.double())
    return {
        SOURCE_LOSS + name: Metric(total, per=SOURCE_LOSS + name)
        for name, total in zip(names, sums.unbind(), strict=True)
    }
