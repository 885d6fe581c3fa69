"""The micro-batch BERT runs on: samples end to end, and what is to be predicted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from elastrata_workloads.unpadded.batch import UnpaddedBatch


@dataclass(frozen=True, kw_only=True)
class BertBatch(UnpaddedBatch):
    """N samples, their masked tokens replaced in `input_ids`; the targets are what stood there."""

    token_types: Tensor | None
    """Pairs only, shape [T], int64: 0 in the first sentence, 1 in the second."""
    sample_starts: Tensor | None
    """Next-sentence prediction only, shape [N], int64: index of each sample's first token."""
    not_next: Tensor | None
    """Next-sentence prediction only, shape [N], int64: 1 where the second does not follow."""

    @property
    @override
    def _per_token(self) -> tuple[str, ...]:
        return (*super()._per_token, "token_types")
