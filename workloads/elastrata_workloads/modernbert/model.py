"""ModernBERT (Warner et al. 2024, arXiv 2412.13663) on concatenated samples, without padding.

It has norms before each half of a block and after the embeddings, no biases but the decoder's, a
gated feed-forward and rotary positions. Two in three layers attend within a window. The decoder is
the token embedding.

Shapes: P predicted tokens, E hidden size, V rows of the vocabulary table.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastrata_workloads.modernbert.shape import ModernBertShape
from elastrata_workloads.unpadded.block import Block
from elastrata_workloads.unpadded.stack import Embeddings, Stack

_MAX_DEVIATIONS = 2.0
"""Maximum distance of initial weights from 0, in standard deviations."""


class ModernBertModel(Stack):
    """An encoder: embeddings, blocks, norm and head."""

    head: PredictionHead

    def __init__(self, shape: ModernBertShape) -> None:
        super().__init__(num_ids=shape.num_ids, is_tied=True)
        self.shape = shape
        self.embeddings = Embeddings(
            shape.num_embeddings, shape.hidden_size, norm=shape.norm, dropout=0.0
        )
        blocks = (Block(shape.block(number)) for number in range(shape.num_layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = shape.norm.over(shape.hidden_size)
        self.head = PredictionHead(shape)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Initialise all parameters from torch's current generator.

        As published (Warner et al. 2024, section 2.2, "Megatron initialization"), the initial
        weights of the projections that add to the residual stream, two in each of L blocks, and
        those of the head are smaller by sqrt(2 L).
        """
        deviation = self.shape.initializer_range
        smaller = deviation / math.sqrt(2 * self.shape.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                is_last = name.endswith(("attention.output", "feed_forward.down", "head.dense"))
                _draw_truncated(module.weight, smaller if is_last else deviation)
            if isinstance(module, nn.LayerNorm):
                module.weight.fill_(1.0)
        # As transformers' `padding_idx` does.
        self.embeddings.tokens.weight[self.shape.pad_id].zero_()
        self.head.bias.zero_()


class PredictionHead(nn.Module):
    """The masked-language-model head, whose decoder is the token embedding."""

    def __init__(self, shape: ModernBertShape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.norm = shape.norm.over(shape.hidden_size)
        self.bias = nn.Parameter(torch.zeros(shape.num_embeddings))

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return logits of shape [P, V] from [P, E] and the table [V, E]."""
        return F.linear(self.norm(F.gelu(self.dense(hidden))), tokens, self.bias)


def _draw_truncated(weight: Tensor, deviation: float) -> None:
    """Draw weights from a truncated normal distribution, by its inverse."""
    # torch's `trunc_normal_` redraws until all numbers fit. It takes nine times as long, and never
    # ends in a rehearsal, whose tensors have no values.
    most = math.erf(_MAX_DEVIATIONS / math.sqrt(2))
    weight.uniform_(-most, most).erfinv_().mul_(math.sqrt(2) * deviation)
    weight.clamp_(
        -_MAX_DEVIATIONS * deviation, _MAX_DEVIATIONS * deviation
    )  # what rounding puts beyond
