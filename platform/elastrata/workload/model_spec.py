"""The numbers of a transformer that its memory and time depend on, and the FLOPs they make.

A multiplication with its addition counts as two. Recomputation is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from elastrata_pipelines.deal import WorkModel, pairs_within

_FORWARD = 2
_FORWARD_AND_BACKWARD = 6
"""Per parameter and token: the backward pass multiplies twice, for the input and for the weight."""

LOGITS_AT_ONCE = 2**25
"""On a GPU the loss is computed of so many logits at a time, where there are more."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model of equal blocks between an embedding and a head, on samples of one length. Blocks may
    differ in what they attend to."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    """Width of the feed-forward."""
    gated: bool
    """Whether the feed-forward has three matrices instead of two, as SwiGLU's."""
    causal: bool
    window: int | None = None
    """Tokens to each side that windowed blocks, which are not causal, attend to; None: there are no
    such blocks."""
    global_every: int = 1
    """With a window: the first of so many blocks, and so on, attends to all tokens."""
    vocabulary: int
    """Rows of the embedding table."""
    position_rows: int
    """Rows of the table of learned positions; 0 without one."""
    tied: bool
    """Whether the head is the embedding."""
    block_vectors: int
    """Numbers in a block's biases and norms."""
    embedding_additions: int = 1
    """Additions for each feature of a token: one less than there are tables."""
    embedding_norm: bool = False
    """Whether embeddings are normed before the first block."""
    first_norm: bool = True
    """Whether the first block norms what it is given, as the others do."""
    dropouts: int = 0
    """Dropouts of a block, each with a mask of a byte for every feature of a token."""
    head_extra: int = 0
    """Parameters of the head's own matrices beside the one that gives logits."""
    head_states: int = 2
    """Hidden states of a predicted token that the head keeps: before and after a norm, and what
    matrices of its own make of them."""
    sample_extra: int = 0
    """Parameters of matrices that are applied once to every sample."""
    qk_norm: bool = False
    """Whether queries and keys are normalised: operations, not products, so no FLOPs that count."""
    predicted: float = 1.0
    """Share of the tokens that logits are computed of."""
    seq_len: int

    @property
    def kv_width(self) -> int:
        """Width of the key, and of the value."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def block_matrices(self) -> int:
        """Parameters of a block's matrices."""
        feed_forward = (3 if self.gated else 2) * self.hidden * self.feed_forward
        return 2 * self.hidden * (self.hidden + self.kv_width) + feed_forward

    @property
    def block_parameters(self) -> int:
        """All parameters of a block."""
        return self.block_matrices + self.block_vectors

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the tables of tokens and positions."""
        return (self.vocabulary + self.position_rows) * self.hidden

    @property
    def prediction_parameters(self) -> int:
        """Parameters of the matrices that are applied to every predicted token, tied or not."""
        return self.hidden * self.vocabulary + self.head_extra

    @property
    def head_parameters(self) -> int:
        """Parameters of the head that are not the embedding's."""
        extra = self.head_extra + self.sample_extra
        return extra + (0 if self.tied else self.vocabulary * self.hidden)

    @cached_property
    def parameters(self) -> int:
        """All of them; norms outside of blocks are left out."""
        blocks = self.layers * self.block_parameters
        return blocks + self.embedding_parameters + self.head_parameters

    @property
    def work(self) -> WorkModel:
        """FLOPs of the forward pass for a sample by its length, with its expected predictions."""
        head = round(self.predicted * self.prediction_parameters)
        return WorkModel(
            linear=_FORWARD * (self.layers * self.block_matrices + head),
            quadratic=_FORWARD * self._global_blocks * self._block_attention(1),
            windowed=_FORWARD * (self.layers - self._global_blocks) * 2 * self.hidden,
            window=self.window or 0,
        )

    @cached_property
    def block_flops(self) -> list[int]:
        """FLOPs of every block's forward pass for a sample of full length. The first block has
        those of the embeddings, too; the last those of the heads, with the expected predictions."""
        products = self.block_matrices * self.seq_len
        attention = [self._attention_of(block, self.seq_len) for block in range(self.layers)]
        flops = [_FORWARD * (products + own) for own in attention]
        flops[0] += self.embedding_additions * self.hidden * self.seq_len
        predictions = round(self.predicted * self.seq_len)
        flops[-1] += _FORWARD * (self.prediction_parameters * predictions + self.sample_extra)
        return flops

    def training_flops(self, lengths: Sequence[int], predictions: float) -> float:
        """Forward and backward for samples of these lengths, attention halved where it is causal:
        the FLOPs that MFU counts. A whole number for a whole number of predictions.

        Args:
            lengths: of the samples, or of the documents packed into them, which attend to
                themselves only.
            predictions: how many tokens are predicted.
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
        """Forward and backward for a sample of full length, with its expected predictions."""
        return self.training_flops([self.seq_len], self.predicted * self.seq_len)

    @property
    def mean_context(self) -> float:
        """Tokens that one of a sample of full length attends to, on average over blocks, counted as
        half of them where it is causal."""
        return self._attention(self.seq_len) / (2 * self.hidden * self.seq_len * self.layers)

    @property
    def _global_blocks(self) -> int:
        """Those that attend to all tokens."""
        return self.layers if self.window is None else -(-self.layers // self.global_every)

    def _attention(self, length: int) -> int:
        """Products in the attention of all blocks for one sample."""
        every = self._global_blocks * self._block_attention(length)
        return every + (self.layers - self._global_blocks) * self._window_attention(length)

    def _attention_of(self, block: int, length: int) -> int:
        is_global = self.window is None or block % self.global_every == 0
        return self._block_attention(length) if is_global else self._window_attention(length)

    def _window_attention(self, length: int) -> int:
        """Products in the attention of a windowed block for one sample."""
        pairs = int(pairs_within(np.array(length), self.window or 0))
        return 2 * self.hidden * pairs

    def _block_attention(self, length: int) -> int:
        """Products in a block's attention for one sample: s^2 h for scores, as many for values,
        half of that where it is causal."""
        return (1 if self.causal else 2) * self.hidden * length * length
