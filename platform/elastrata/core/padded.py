"""A padded batch: for models that take samples side by side, each filled up to the longest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from elastrata_pipelines.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Padded:
    """N samples of up to L tokens."""

    tokens: Tensor
    """Shape [N, L], int64."""
    lengths: Tensor
    """Shape [N], int64; 0 for the sample of a batch that has none."""

    @property
    def is_real(self) -> Tensor:
        """Shape [N, L], bool: where there is a token, no padding."""
        return torch.arange(self.tokens.shape[1])[None, :] < self.lengths[:, None]


def padded(rows: Rows, pad_id: int) -> Padded:
    """Samples side by side. Rows that are empty give one sample of padding, so that the model runs
    and collectives match.

    Args:
        rows: the samples; a micro-batch's are close in length, so little is padding.
        pad_id: what fills them up.
    """
    count, longest = max(1, len(rows)), max(1, int(rows.lengths.max(initial=0)))
    lengths = np.zeros(count, dtype=np.int64)
    lengths[: len(rows)] = rows.lengths
    tokens = np.full((count, longest), pad_id, dtype=np.int64)
    tokens[np.arange(longest)[None, :] < lengths[:, None]] = rows.tokens
    return Padded(tokens=torch.from_numpy(tokens), lengths=torch.from_numpy(lengths))
