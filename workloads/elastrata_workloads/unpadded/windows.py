"""Attention of every token to those near it, over samples of one length.

N samples of L tokens; H heads; D: size of a head; W: tokens to each side; B: queries of a block; S:
the keys that a block can see, B + 2 W; C: blocks of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_FULL_UP_TO = 6
"""Times W: shorter samples attend to all, with a mask, at no higher cost than in blocks."""


def sees_all(length: int, window: int | None) -> bool:
    """Whether no token of a sample is out of another one's window."""
    return window is None or length <= window + 1


def within(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Scaled dot-product attention of every token to those at most `window` apart.

    Long samples are cut into blocks of queries, each with the keys in reach of it, as Longformer's
    are (Beltagy et al. 2020, arXiv 2004.05150, section 3.1): the work is linear in L.

    Args:
        query: shape [N, H, L, D]; so are key and value.
        key: see query.
        value: see query.
        window: W.

    Returns:
        Shape [N, H, L, D].
    """
    blocks = Blocks(query.shape[2], window)
    out = F.scaled_dot_product_attention(
        blocks.of_queries(query),
        blocks.of_keys(key),
        blocks.of_keys(value),
        attn_mask=blocks.mask(query),
    )
    return blocks.whole(out, query.shape[:2])


@dataclass(frozen=True)
class Blocks:
    """The blocks that samples are cut into; one with all tokens where samples are short."""

    length: int
    window: int

    @property
    def is_one(self) -> bool:
        """Whether samples are not cut."""
        return self.length <= _FULL_UP_TO * self.window

    @property
    def count(self) -> int:
        """C."""
        return -(-self.length // self.window)

    def of_queries(self, tokens: Tensor) -> Tensor:
        """Shape [N, H, L, ...] to [N H, C, B, ...], filled up with zeros."""
        if self.is_one:
            return tokens
        filled = F.pad(tokens, (*_nothing(tokens), 0, self._missing))
        samples, heads = tokens.shape[:2]
        shape = (samples * heads, self.count, self.window, *tokens.shape[3:])
        return filled.reshape(shape)

    def of_keys(self, tokens: Tensor) -> Tensor:
        """Shape [N, H, L, D] to [N H, C, S, D], which overlap in memory."""
        if self.is_one:
            return tokens
        sides = (self.window, self.window + self._missing)
        filled = F.pad(tokens, (0, 0, *sides)).flatten(0, 1)
        return filled.unfold(1, 3 * self.window, self.window).transpose(2, 3)

    def whole(self, blocks: Tensor, samples: torch.Size) -> Tensor:
        """The inverse of `of_queries`, for samples and heads [N, H]."""
        if self.is_one:
            return blocks
        tokens = blocks.flatten(1, 2)[:, : self.length]
        return tokens.reshape(*samples, *tokens.shape[1:])

    def added_up(self, blocks: Tensor, samples: torch.Size) -> Tensor:
        """Shape [N H, C, S, D] to [N, H, L, D]: for every key the sum over the blocks that have
        it."""
        if self.is_one:
            return blocks
        places = blocks.new_zeros(blocks.shape[0], self.count + 2, self.window, blocks.shape[-1])
        for number, part in enumerate(blocks.chunk(3, dim=2)):
            places[:, number : number + self.count] += part
        tokens = places.flatten(1, 2)[:, self.window :][:, : self.length]
        return tokens.reshape(*samples, *tokens.shape[1:])

    def mask(self, like: Tensor) -> Tensor:
        """What is added to the scores, 0 or -inf: shape [L, L] or [C, B, S]."""
        width = self.length if self.is_one else self.window
        first = 0 if self.is_one else -self.window
        span = self.length if self.is_one else 3 * self.window
        rows = torch.arange(width, device=like.device)[:, None]
        columns = torch.arange(first, first + span, device=like.device)
        near = (rows - columns).abs() <= self.window
        if not self.is_one:
            starts = torch.arange(self.count, device=like.device)[:, None, None] * self.window
            keys = starts + columns
            near = near & (keys >= 0) & (keys < self.length)
        return like.new_zeros(near.shape).masked_fill_(~near, -torch.inf)

    @property
    def _missing(self) -> int:
        return self.count * self.window - self.length


def _nothing(tokens: Tensor) -> tuple[int, ...]:
    """No padding, for every dim behind the tokens'."""
    return (0, 0) * (tokens.ndim - 3)
