"""The micro-batch BERT runs on: samples end to end, and what is to be predicted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from elastrata.training.workload import Batch


@dataclass(frozen=True, eq=False)
class Segments:
    """Where attention stops: a segment is a sample, or one document of a packed sample."""

    offsets: Tensor
    """Shape [G + 1], int32, on the model's device: starts of the segments, then T."""
    lengths: tuple[int, ...]
    """The same as G lengths, known to the host without asking the device."""
    longest: int
    """No segment is longer. Rounded up, so that compiled blocks see few different numbers."""


@dataclass(frozen=True, kw_only=True)
class BertBatch(Batch):
    """N samples of T tokens in G segments, with P masked tokens to predict.

    A micro-batch without samples holds one segment of padding tokens with nothing to predict: the
    model runs as ever, so that collectives match, and all sums and gradients are zero.
    """

    input_ids: Tensor
    """Shape [T], int64, with the masked tokens replaced."""
    positions: Tensor
    """Shape [T], int64: place of each token in its segment."""
    token_types: Tensor | None
    """Pairs only, shape [T], int64: 0 in the first sentence, 1 in the second."""
    offsets: Tensor
    """Shape [G + 1], int32: starts of the segments, then T."""
    segment_lengths: tuple[int, ...]
    """G lengths."""
    predicted: Tensor
    """Shape [P], int64: indices into the T tokens, ascending."""
    targets: Tensor
    """Shape [P], int64: the tokens that stood there."""
    sample_starts: Tensor | None
    """Next-sentence prediction only, shape [N], int64: index of each sample's first token."""
    not_next: Tensor | None
    """Next-sentence prediction only, shape [N], int64: 1 where the second does not follow."""
    dropout_keys: Tensor | None
    """With dropout only, shape [T], int64: a hash of (seed, epoch, sample, token)."""

    @property
    def segments(self) -> Segments:
        """What attention needs to know."""
        longest = max(self.segment_lengths)
        return Segments(self.offsets, self.segment_lengths, longest=1 << (longest - 1).bit_length())
