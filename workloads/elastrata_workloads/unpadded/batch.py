"""Micro-batches without padding: concatenated samples, attention segments and targets."""

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

# Not 1: torch.compile would compile every block again for a dimension of size 1.
FILLER_TOKENS = 2
"""Number of tokens in a micro-batch without samples."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Boundaries of attention: a segment is a sample, or one document of a packed sample."""

    offsets: Tensor
    """Shape [G + 1], int32, on the model's device: starts of the segments, then T."""
    lengths: tuple[int, ...]
    """Lengths of the G segments, known on the host without a device synchronisation."""
    longest: int
    """Upper bound on the segment lengths, rounded up to a power of two."""


@dataclass(frozen=True, kw_only=True)
class UnpaddedBatch(Batch):
    """N samples of T tokens in G segments, with P tokens to predict.

    A micro-batch without samples holds one segment of padding tokens and no predictions: the model
    runs as usual, so that collectives match, and all sums and gradients are zero.
    """

    input_ids: Tensor
    """Shape [T], int64: the model's input."""
    positions: Tensor
    """Shape [T], int64: position of each token in its segment."""
    offsets: Tensor
    """Shape [G + 1], int32: starts of the segments, then T."""
    segment_lengths: tuple[int, ...]
    """Lengths of the G segments."""
    predicted: Tensor
    """Shape [P], int64: indices of the predicted positions into the T tokens, ascending."""
    targets: Tensor
    """Shape [P], int64: the correct ids at the predicted positions."""
    dropout_keys: Tensor | None
    """Shape [T], int64: a hash of (seed, epoch, sample, token); None without dropout."""
    sources: Tensor | None = None
    """Shape [P], int64: index of each prediction's source; None without a mixture."""
    source_names: tuple[str, ...] = ()
    """Names of all sources, by index; empty without a mixture."""

    def filled(self, multiple: int) -> Self:
        """Return this batch with its token count rounded up to a multiple of `multiple`.

        The added tokens form a separate segment without predictions, so no sum and no gradient
        changes.
        """
        return self.filled_to(len(self.input_ids) + -len(self.input_ids) % multiple)

    def filled_to(self, num_tokens: int) -> Self:
        """Return this batch filled up to `num_tokens` tokens, as `filled` does."""
        num_added = num_tokens - len(self.input_ids)
        if not num_added:
            return self
        per_token: dict[str, Any] = {
            name: F.pad(value, (0, num_added))
            for name in self._per_token
            if (value := getattr(self, name)) is not None
        }
        return replace(
            self,
            **per_token,
            num_positions=num_tokens,
            offsets=F.pad(self.offsets, (0, 1), value=len(self.input_ids) + num_added),
            segment_lengths=(*self.segment_lengths, num_added),
        )

    @property
    def _per_token(self) -> tuple[str, ...]:
        """Names of the tensors of shape [T]."""
        return ("input_ids", "positions", "dropout_keys")

    @property
    def segments(self) -> Segments:
        """The segments for attention."""
        # Rounded up to a power of two, so that compiled blocks see few different values.
        longest = max(self.segment_lengths)
        return Segments(self.offsets, self.segment_lengths, longest=1 << (longest - 1).bit_length())


def unpad(
    rows: Rows,
    *,
    tokens: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64],
    dropout_keys: npt.NDArray[np.uint64] | None,
    terms: Sequence[str],
) -> UnpaddedBatch:
    """Return the micro-batch of `rows`; positions restart in every document of a packed sample.

    Args:
        rows: the samples, T tokens in total.
        tokens: input ids, shape [T].
        predicted: indices into `tokens`, ascending, shape [P].
        targets: correct ids at these indices, shape [P].
        dropout_keys: shape [T]; None: no dropout.
        terms: names of loss terms; every prediction counts in each.
    """
    starts, lengths = rows.segment_starts, rows.segment_lengths
    sources = sources_of(rows, predicted)
    keys = None if dropout_keys is None else torch.from_numpy(dropout_keys.view(np.int64))
    return UnpaddedBatch(
        weights=dict.fromkeys(terms, float(len(predicted))) | source_weights(rows, sources),
        num_positions=len(tokens),
        input_ids=torch.from_numpy(tokens),
        positions=torch.from_numpy(np.arange(len(tokens)) - np.repeat(starts, lengths)),
        # int32, as the varlen kernel requires.
        offsets=torch.from_numpy(np.append(starts, len(tokens)).astype(np.int32)),
        segment_lengths=tuple(lengths.tolist()),
        predicted=torch.from_numpy(predicted),
        targets=torch.from_numpy(targets),
        dropout_keys=keys,
        sources=sources,
        source_names=rows.source_names,
    )


def filler_batch(rows: Rows, *, pad_id: int, dropout: bool, terms: Sequence[str]) -> UnpaddedBatch:
    """Return the micro-batch without samples."""
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
        # Every rank's batches must have the same fields, or compiled blocks would differ.
        dropout_keys=zeros if dropout else None,
        sources=zeros[:0] if rows.source_names else None,
        source_names=rows.source_names,
    )


def fill_to_equal_length(batches: Sequence[Batch], multiple: int) -> list[Batch]:
    """Fill all micro-batches up to the longest one's token count, rounded up to `multiple`.

    Raises:
        TypeError: a batch is not an `UnpaddedBatch`.
    """
    unpadded = [batch for batch in batches if isinstance(batch, UnpaddedBatch)]
    if len(unpadded) < len(batches):
        raise TypeError("expected UnpaddedBatch")
    longest = max(len(batch.input_ids) for batch in unpadded)
    return [batch.filled_to(longest + -longest % multiple) for batch in unpadded]


def sources_of(rows: Rows, predicted: npt.NDArray[np.int64]) -> Tensor | None:
    """Return the source index of every prediction, shape [P], or None without a mixture."""
    if rows.sources is None:
        return None
    return torch.from_numpy(np.repeat(rows.sources, rows.lengths)[predicted].astype(np.int64))


def source_weights(rows: Rows, sources: Tensor | None) -> dict[str, float]:
    """Return the number of predictions of each source, by the name of its loss."""
    count = len(rows.source_names)
    if not count:
        return {}
    numbers = torch.zeros(0, dtype=torch.int64) if sources is None else sources
    counts = torch.bincount(numbers, minlength=count).tolist()
    return {
        SOURCE_LOSS + name: float(number)
        for name, number in zip(rows.source_names, counts, strict=True)
    }


def source_losses(
    each: Tensor | None, sources: Tensor | None, names: tuple[str, ...]
) -> dict[str, Metric]:
    """Return the loss of each source; empty without a mixture."""
    if each is None or sources is None:
        return {}
    sums = torch.zeros(len(names), dtype=torch.float64, device=each.device)
    sums.index_add_(0, sources, each.double())
    return {
        SOURCE_LOSS + name: Metric(total, per=SOURCE_LOSS + name)
        for name, total in zip(names, sums.unbind(), strict=True)
    }
