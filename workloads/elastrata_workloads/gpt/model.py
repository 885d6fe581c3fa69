"""GPT (Radford et al. 2019) and Llama (Touvron et al. 2023) on samples laid end to end.

One decoder, composed of parts: learned or rotary positions, a feed-forward with GELU or SwiGLU,
LayerNorm or RMSNorm before each half of a block, as many or fewer heads for key and value, a head
of its own or the token embedding.

Shapes: T tokens of the micro-batch, P predicted tokens, H heads, K heads of key and value,
D = E / H, E hidden size, F feed-forward size, V rows of the vocabulary's table.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastrata_workloads.gpt.batch import GptBatch
from elastrata_workloads.gpt.shape import GptShape
from elastrata_workloads.unpadded.attention import attention
from elastrata_workloads.unpadded.batch import Segments
from elastrata_workloads.unpadded.dropout import HiddenDropout, layer_keys
from elastrata_workloads.unpadded.logits import of_ids


class GptModel(nn.Module):
    """Embeddings, blocks, norm and head."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings = Embeddings(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = norm(shape, shape.hidden_size)
        self.head = (
            TiedHead()
            if shape.tied_embeddings
            else nn.Linear(shape.hidden_size, shape.num_embeddings, bias=False)
        )
        self.initialize()

    def forward(self, batch: GptBatch) -> Tensor:
        """Logits of the predicted tokens, shape [P, V]; see `of_ids`."""
        hidden = self.embeddings(batch.input_ids, batch.positions, batch.dropout_keys)
        segments = batch.segments
        for index, block in enumerate(self.blocks):
            keys = layer_keys(batch.dropout_keys, index)
            hidden = block(hidden, segments, batch.positions, keys)
        return logits(self, hidden, batch)

    @torch.no_grad()
    def initialize(self) -> None:
        """Draws all parameters anew from torch's current generator.

        As GPT-2 (Radford et al. 2019, section 2.3): the projections that add to the residual
        stream, two in each of L blocks, are smaller by sqrt(2 L).
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
                for projection in (module.attention.output, module.feed_forward.down):
                    projection.weight.normal_(0.0, deviation / math.sqrt(2 * self.shape.num_layers))


def logits(model: Any, hidden: Tensor, batch: GptBatch) -> Tensor:
    """Logits, as of `GptModel.forward`, from the last hidden states."""
    hidden = model.norm(hidden.index_select(0, batch.predicted))
    table = [model.embeddings.tokens.weight] if model.shape.tied_embeddings else []
    return of_ids(model.head(hidden, *table), model.shape.num_ids)


class Embeddings(nn.Module):
    """Token embeddings, with learned positions added where the model has them."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        learned = shape.positions == "learned"
        self.tokens = nn.Embedding(shape.num_embeddings, shape.hidden_size)
        self.positions = nn.Embedding(shape.max_positions, shape.hidden_size) if learned else None
        self.dropout = HiddenDropout(shape.dropout, site=0)

    def forward(self, input_ids: Tensor, positions: Tensor, dropout_keys: Tensor | None) -> Tensor:
        """Shape [T, E] from ids and positions of shape [T]."""
        hidden: Tensor = self.tokens(input_ids)
        if self.positions is not None:
            hidden = hidden + self.positions(positions)
        out: Tensor = self.dropout(hidden, dropout_keys)
        return out


class TiedHead(nn.Module):
    """The head that is the token embedding; a module, so that parallelism has a place to act."""

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Logits of shape [P, V] from [P, E] and the table [V, E]."""
        return F.linear(hidden, tokens)


class Block(nn.Module):
    """Attention, then feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.attention_norm = norm(shape, shape.hidden_size)
        self.attention = Attention(shape)
        self.attention_dropout = HiddenDropout(shape.dropout, site=1)
        self.feed_forward_norm = norm(shape, shape.hidden_size)
        gated = shape.activation == "swiglu"
        self.feed_forward = GatedFeedForward(shape) if gated else FeedForward(shape)
        self.feed_forward_dropout = HiddenDropout(shape.dropout, site=2)

    def forward(
        self, hidden: Tensor, segments: Segments, positions: Tensor, dropout_keys: Tensor | None
    ) -> Tensor:
        """Shape [T, E] to [T, E]; positions of shape [T]."""
        attended = self.attention(self.attention_norm(hidden), segments, positions)
        hidden = hidden + self.attention_dropout(attended, dropout_keys)
        fed = self.feed_forward(self.feed_forward_norm(hidden))
        out: Tensor = hidden + self.feed_forward_dropout(fed, dropout_keys)
        return out


class Attention(nn.Module):
    """Causal self-attention with its projections."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        kv_size = shape.num_kv_heads * shape.head_size
        self.head_size = shape.head_size
        self.kernel = shape.attention
        self.rotary_base = shape.rotary_base if shape.positions == "rotary" else None
        self.query = nn.Linear(shape.hidden_size, shape.hidden_size, bias=shape.bias)
        self.key = nn.Linear(shape.hidden_size, kv_size, bias=shape.bias)
        self.value = nn.Linear(shape.hidden_size, kv_size, bias=shape.bias)
        self.output = nn.Linear(shape.hidden_size, shape.hidden_size, bias=shape.bias)
        self.query_norm = norm(shape, shape.head_size) if shape.qk_norm else None
        self.key_norm = norm(shape, shape.head_size) if shape.qk_norm else None

    def forward(self, hidden: Tensor, segments: Segments, positions: Tensor) -> Tensor:
        """Shape [T, E] to [T, E]."""
        # -1: under tensor parallelism a rank holds some of the heads only.
        heads = (-1, self.head_size)
        query = self.query(hidden).unflatten(-1, heads)
        key = self.key(hidden).unflatten(-1, heads)
        value = self.value(hidden).unflatten(-1, heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary_base is not None:
            query = rotated(query, positions, self.rotary_base)
            key = rotated(key, positions, self.rotary_base)
        attended = attention(query, key, value, segments, self.kernel, causal=True)
        out: Tensor = self.output(attended.flatten(-2))
        return out


class FeedForward(nn.Module):
    """GPT-2's: GELU, by its tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.bias)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Shape [T, E] to [T, E]."""
        out: Tensor = self.down(F.gelu(self.up(hidden), approximate="tanh"))
        return out


class GatedFeedForward(nn.Module):
    """Llama's: SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.bias)
        self.up = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.bias)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Shape [T, E] to [T, E]."""
        out: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return out


def norm(shape: GptShape, size: int) -> nn.LayerNorm | nn.RMSNorm:
    """A norm over so many features. RMSNorm (Zhang and Sennrich 2019) never has a bias."""
    if shape.norm == "rms":
        return nn.RMSNorm(size, eps=shape.norm_eps)
    return nn.LayerNorm(size, eps=shape.norm_eps, bias=shape.bias)


def rotated(heads: Tensor, positions: Tensor, base: float) -> Tensor:
    """Turns every head by angles that grow with the position.

    Feature i of the first half of a head and feature i of the second half are turned as a pair, by
    position * base^(-2 i / D): transformers' layout of Llama's weights. In fp32, as bf16 could not
    tell neighbouring positions apart.

    Args:
        heads: shape [T, H, D], D even.
        positions: shape [T], int64: place of each token in its segment.
        base: the slowest pair takes about 2 pi * base positions to turn once.
    """
    size = heads.shape[-1]
    exponents = torch.arange(0, size, 2, device=heads.device, dtype=torch.float32) / size
    angles = (positions[:, None] * (1.0 / base**exponents))[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)
