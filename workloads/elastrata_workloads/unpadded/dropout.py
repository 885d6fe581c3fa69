"""Dropout whose mask belongs to the token, not to the process that happens to draw it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# "lowbias32" multipliers of Wellons, "Prospecting for Hash Functions" (2018), as signed int32.
_M1 = 0x7FEB352D
_M2 = 0x846CA68B - 2**32
_BITS = 24


class HiddenDropout(nn.Module):
    """Zeroes activations with probability `rate` and scales the others by 1 / (1 - rate).

    The mask is a hash of (token key, site, feature), so it is the same in a recomputation, on any
    rank and in any micro-batch. It is a function of integers only: no generator state is touched.

    Args:
        rate: probability of a zero, in [0, 1).
        site: a number of its own for every place of a block that drops; keys tell blocks apart.
    """

    def __init__(self, rate: float, site: int) -> None:
        super().__init__()
        self.rate = rate
        self.site = site

    def forward(self, hidden: Tensor, keys: Tensor | None) -> Tensor:
        """Drops in training, with keys; otherwise returns `hidden` as it is.

        Args:
            hidden: shape [T, E].
            keys: shape [T], int64: (seed, epoch, sample, token) hashed; None switches dropout off.
        """
        if not self.training or self.rate == 0.0 or keys is None:
            return hidden
        drawn = token_feature_hash(keys, self.site, hidden.shape[-1])
        kept = drawn >= int(self.rate * 2**_BITS)
        return hidden * kept * (1.0 / (1.0 - self.rate))


def layer_keys(keys: Tensor | None, layer: int) -> Tensor | None:
    """The token keys of one block, made outside of it: blocks stay alike and compile only once."""
    return None if keys is None else keys + layer


def token_feature_hash(keys: Tensor, site: int, num_features: int) -> Tensor:
    """A number from 0 to 2^24 - 1 for every token and feature, shape [T, num_features], int32."""
    folded = (keys ^ (keys >> 32)).to(torch.int32)
    tokens = _mix(folded ^ _mix(torch.full_like(folded, site + 1)))
    features = _mix(torch.arange(num_features, device=keys.device, dtype=torch.int32))
    drawn: Tensor = _mix(tokens[:, None] ^ features) & (2**_BITS - 1)
    return drawn


def _mix(x: Tensor) -> Tensor:
    # Signed shifts copy the sign bit; the masks make them logical.
    x = (x ^ ((x >> 16) & 0xFFFF)) * _M1
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _M2
    return x ^ ((x >> 16) & 0xFFFF)
