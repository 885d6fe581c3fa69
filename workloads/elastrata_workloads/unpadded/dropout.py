"""Dropout whose mask depends on the token and not on the process that computes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# "lowbias32" multipliers of Wellons, "Prospecting for Hash Functions" (2018), as signed int32.
_M1 = 0x7FEB352D
_M2 = 0x846CA68B - 2**32
_BITS = 24


class HiddenDropout(nn.Module):
    """Zeroes activations with probability `rate` and scales the others by 1 / (1 - rate).

    The mask is a hash of (token key, site, feature), so it is the same in recomputation, on any
    rank and in any micro-batch. It uses integer arithmetic only and no random generator.

    Args:
        rate: probability of a zero, in [0, 1).
        site: index of this dropout within a block, unique there; token keys differ between blocks.
    """

    def __init__(self, rate: float, site: int) -> None:
        super().__init__()
        self.rate = rate
        self.site = site

    def forward(self, hidden: Tensor, keys: Tensor | None) -> Tensor:
        """Apply dropout in training if there are keys; otherwise return `hidden` unchanged.

        Args:
            hidden: shape [T, E].
            keys: shape [T], int64: hash of (seed, epoch, sample, token); None disables dropout.
        """
        if not self.training or self.rate == 0.0 or keys is None:
            return hidden
        hashes = token_feature_hash(keys, self.site, hidden.shape[-1])
        # An integer comparison gives the same mask on every device and dtype.
        is_kept = hashes >= int(self.rate * 2**_BITS)
        return hidden * is_kept * (1.0 / (1.0 - self.rate))


def layer_keys(keys: Tensor | None, layer: int) -> Tensor | None:
    """Return the token keys of one block."""
    # Computed outside the block: blocks stay identical, so torch.compile compiles only one.
    return None if keys is None else keys + layer


def token_feature_hash(keys: Tensor, site: int, num_features: int) -> Tensor:
    """Return an integer in [0, 2^24) for every token and feature, shape [T, num_features],
    int32."""
    # The hash is 32-bit: the 64-bit keys are folded first.
    keys_32 = (keys ^ (keys >> 32)).to(torch.int32)
    tokens = _mix(keys_32 ^ _mix(torch.full_like(keys_32, site + 1)))
    features = _mix(torch.arange(num_features, device=keys.device, dtype=torch.int32))
    hashes: Tensor = _mix(tokens[:, None] ^ features) & (2**_BITS - 1)
    return hashes


def _mix(x: Tensor) -> Tensor:
    # Signed shifts copy the sign bit; the masks make them logical.
    x = (x ^ ((x >> 16) & 0xFFFF)) * _M1
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _M2
    return x ^ ((x >> 16) & 0xFFFF)
