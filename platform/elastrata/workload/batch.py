"""A micro-batch for a model: a workload's own batch, or padded samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from elastrata.device.device_transfer import to_device
from elastrata_pipelines.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch, ready for the model. Workloads subclass it and add their tensors."""

    # Known before the forward pass, so that the step can divide by the weight of the global batch.
    weights: Mapping[str, float]
    """Weight (number of predictions) of this micro-batch by loss term."""
    num_positions: int
    """Number of token positions that the model computes, including padding."""

    def to(self, device: torch.device) -> Self:
        """Return a copy with all tensors on `device`, without a wait of the host."""
        tensors = {
            name: to_device(value, device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return type(self)(**{**vars(self), **tensors})


@dataclass(frozen=True, kw_only=True)
class PaddedTokens:
    """N samples of up to L tokens."""

    tokens: Tensor
    """Shape [N, L], int64."""
    lengths: Tensor
    """Shape [N], int64; 0 for the filler of an empty batch."""

    @property
    def is_real(self) -> Tensor:
        """Mask of real tokens, shape [N, L], bool."""
        return torch.arange(self.tokens.shape[1])[None, :] < self.lengths[:, None]


def pad(rows: Rows, pad_id: int) -> PaddedTokens:
    """Return samples padded to the longest one.

    Args:
        rows: the samples. Those of a micro-batch have similar lengths, so there is little padding.
        pad_id: token id of the padding.
    """
    # Empty rows give one sample of padding, so that the model runs and its collectives match those
    # of other ranks.
    count, longest = max(1, len(rows)), max(1, int(rows.lengths.max(initial=0)))
    lengths = np.zeros(count, dtype=np.int64)
    lengths[: len(rows)] = rows.lengths
    tokens = np.full((count, longest), pad_id, dtype=np.int64)
    tokens[np.arange(longest)[None, :] < lengths[:, None]] = rows.tokens
    return PaddedTokens(tokens=torch.from_numpy(tokens), lengths=torch.from_numpy(lengths))
