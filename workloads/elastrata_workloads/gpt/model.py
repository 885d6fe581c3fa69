"""GPT (Radford et al. 2019) and Llama (Touvron et al. 2023) on concatenated samples.

One decoder, composed of options: learned or rotary positions; a feed-forward with GELU or SwiGLU;
LayerNorm or RMSNorm before each half of a block; as many or fewer key and value heads; a separate
head or the token embedding.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from elastrata_workloads.gpt.shape import GptShape
from elastrata_workloads.unpadded.block import Block
from elastrata_workloads.unpadded.stack import Embeddings, Stack, TiedHead


class GptModel(Stack):
    """A decoder: embeddings, blocks, norm and head."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__(num_ids=shape.num_ids, is_tied=shape.tied_embeddings)
        self.shape = shape
        learned = shape.positions == "learned"
        self.embeddings = Embeddings(
            shape.num_embeddings,
            shape.hidden_size,
            num_positions=shape.max_positions if learned else 0,
            dropout=shape.dropout,
        )
        self.blocks = nn.ModuleList(Block(shape.block) for _ in range(shape.num_layers))
        self.norm = shape.block.norm.over(shape.hidden_size)
        self.head = (
            TiedHead()
            if shape.tied_embeddings
            else nn.Linear(shape.hidden_size, shape.num_embeddings, bias=False)
        )
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Initialise all parameters from torch's current generator.

        As in GPT-2 (Radford et al. 2019, section 2.3), the initial weights of the projections that
        add to the residual stream, two in each of L blocks, are smaller by sqrt(2 L).
        """
        deviation = self.shape.initializer_range
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0.0, deviation)
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.weight.fill_(1.0)
            if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
                module.bias.zero_()
        for module in self.modules():
            if isinstance(module, Block):
                # Overwrites the initial values from the first loop.
                for projection in (module.attention.output, module.feed_forward.down):
                    projection.weight.normal_(0.0, deviation / math.sqrt(2 * self.shape.num_layers))
