"""A micro-batch, ready for a model: whatever a workload's model takes, or samples side by side."""

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
    """One micro-batch, ready for the model. Workloads subclass it with their tensors."""

    weights: Mapping[str, float]
    """Per loss term the weight (number of predictions) of this micro-batch, known before the
    forward pass so that the step can divide by the weight of the global batch."""
    num_positions: int
    """Token positions the model computes on, padding included."""

    def to(self, device: torch.device) -> Self:
        """A copy with all its tensors on `device`; the host waits for none of them."""
        moved = {
            name: to_device(value, device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return type(self)(**{**vars(self), **moved})


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
