"""A micro-batch without padding: samples end to end, where attention stops, and what is to be
predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor

from elastrata.core.batch import Batch

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
