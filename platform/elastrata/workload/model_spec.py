"""The numbers of a transformer that determine its memory, time and FLOPs.

A multiplication with its addition counts as two FLOPs. Recomputation is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from elastrata_pipelines.deal import WorkModel, count_pairs_within

_FORWARD = 2
_FORWARD_AND_BACKWARD = 6
"""FLOPs per parameter and token: the backward pass multiplies twice, for the input and the
weight."""

LOGITS_AT_ONCE = 2**25
"""Largest number of logits that a GPU computes at a time for the loss."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model of equal blocks between an embedding and a head, on samples of one length.

    Blocks may differ in their attention's range only.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int | None = None
    """Width of a head; None: `hidden` / `heads`."""
    feed_forward: int
    """Width of the feed-forward."""
    gated: bool
    """Whether the feed-forward has three matrices instead of two, as in SwiGLU."""
    causal: bool
    window: int | None = None
    """Tokens to each side, or before it in a causal block, that a token of a windowed block attends
    to; None: no such blocks."""
    global_every: int = 1
    """With a window, every block whose index is a multiple of this number attends to all tokens; 0:
    no block does."""
    vocabulary: int
    """Rows of the embedding table."""
    position_rows: int
    """Rows of the table of learned positions; 0 without a table."""
    tied: bool
    """Whether the head shares the embedding."""
    block_vectors: int
    """Number of elements in a block's biases and norms."""
    embedding_additions: int = 1
    """Additions for each feature of a token: the number of tables minus one."""
    embedding_norm: bool = False
    """Whether embeddings are normalised before the first block."""
    first_norm: bool = True
    """Whether the first block normalises its input, as the others do."""
    dropouts: int = 0
    """Number of dropouts in a block, each with a mask of one byte per feature and token."""
    head_extra: int = 0
    """Parameters of the head's matrices other than the one that computes logits."""
    head_states: int = 2
    """Number of hidden states that the head keeps for a predicted token: before and after a
    norm, and the outputs of its further matrices."""
    sample_extra: int = 0
    """Parameters of matrices that are applied once per sample."""
    qk_norm: bool = False
    """Whether queries and keys are normalised. These operations are no products and count no
    FLOPs."""
    predicted: float = 1.0
    """Share of tokens for which logits are computed."""
    seq_len: int

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_size or self.hidden // self.heads

    @property
    def width(self) -> int:
        """Width of the queries, and of attention's result."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_width

    @property
    def block_matrices(self) -> int:
        """Number of parameters in a block's matrices."""
        feed_forward = (3 if self.gated else 2) * self.hidden * self.feed_forward
        return 2 * self.hidden * (self.width + self.kv_width) + feed_forward

    @property
    def block_parameters(self) -> int:
        """Number of all parameters in a block."""
        return self.block_matrices + self.block_vectors

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters in the tables of tokens and positions."""
        return (self.vocabulary + self.position_rows) * self.hidden

    @property
    def prediction_parameters(self) -> int:
        """Number of parameters in matrices that are applied to every predicted token, tied or
        not."""
        return self.hidden * self.vocabulary + self.head_extra

    @property
    def head_parameters(self) -> int:
        """Number of parameters of the head, without those shared with the embedding."""
        extra = self.head_extra + self.sample_extra
        return extra + (0 if self.tied else self.vocabulary * self.hidden)

    @cached_property
    def parameters(self) -> int:
        """Number of all parameters, except norms outside of blocks."""
        blocks = self.layers * self.block_parameters
        return blocks + self.embedding_parameters + self.head_parameters

    @property
    def work(self) -> WorkModel:
        """FLOPs of the forward pass for a sample by its length, with its expected predictions."""
        # In a tied head the embedding's matrix is multiplied, so it counts like any other.
        head = round(self.predicted * self.prediction_parameters)
        return WorkModel(
            linear=_FORWARD * (self.layers * self.block_matrices + head),
            quadratic=_FORWARD * self._global_blocks * self._block_attention(1),
            windowed=_FORWARD * (self.layers - self._global_blocks) * self._products_of_pair,
            window=self.window or 0,
        )

    @cached_property
    def block_flops(self) -> list[int]:
        """FLOPs of every block's forward pass for a sample of full length.

        The first block includes the embeddings, and the last one the heads, with the expected
        predictions.
        """
        products = self.block_matrices * self.seq_len
        attention = [self._attention_of(block, self.seq_len) for block in range(self.layers)]
        flops = [_FORWARD * (products + attention_products) for attention_products in attention]
        # Lookups cost no FLOPs, but adding several tables does.
        flops[0] += self.embedding_additions * self.hidden * self.seq_len
        predictions = round(self.predicted * self.seq_len)
        flops[-1] += _FORWARD * (self.prediction_parameters * predictions + self.sample_extra)
        return flops

    def training_flops(self, lengths: Sequence[int], predictions: float) -> float:
        """Return the FLOPs of forward and backward that MFU counts, with causal attention halved.

        The result is a whole number if `predictions` is.

        Args:
            lengths: lengths of the samples, or of the documents packed into them, which only attend
                to themselves.
            predictions: number of predicted tokens.
        """
        attention = sum(self._attention(int(length)) for length in lengths)
        products = (
            self.layers * self.block_matrices * int(sum(lengths))
            + attention
            + self.prediction_parameters * predictions
            + self.sample_extra * len(lengths)
        )
        return _FORWARD_AND_BACKWARD * products

    @cached_property
    def flops_per_sample(self) -> float:
        """FLOPs of forward and backward for a sample of full length, with its expected
        predictions."""
        return self.training_flops([self.seq_len], self.predicted * self.seq_len)

    @property
    def mean_context(self) -> float:
        """Number of tokens that a token attends to in a sample of full length, averaged over
        blocks.

        Causal attention counts half of the tokens.
        """
        return self._attention(self.seq_len) / (2 * self.width * self.seq_len * self.layers)

    @property
    def _global_blocks(self) -> int:
        """Number of blocks that attend to all tokens."""
        if self.window is None:
            return self.layers
        # Rounded up, as the first block is global.
        return -(-self.layers // self.global_every) if self.global_every else 0

    def _attention(self, length: int) -> int:
        """Return the products in the attention of all blocks for one sample."""
        every = self._global_blocks * self._block_attention(length)
        return every + (self.layers - self._global_blocks) * self._window_attention(length)

    def _attention_of(self, block: int, length: int) -> int:
        is_global = self.window is None or (self.global_every and block % self.global_every == 0)
        return self._block_attention(length) if is_global else self._window_attention(length)

    def _window_attention(self, length: int) -> int:
        """Return the products in the attention of a windowed block for one sample."""
        pairs = int(count_pairs_within(np.array(length), self.window or 0))
        return self._products_of_pair * pairs

    def _block_attention(self, length: int) -> int:
        """Return the products in a block's attention for one sample: s^2 h for scores, the same
        for values, and half of both with causal attention."""
        return self._products_of_pair * length * length

    @property
    def _products_of_pair(self) -> int:
        """Products in a block's attention for an ordered pair of tokens, half of them with causal
        attention."""
        return (1 if self.causal else 2) * self.width
