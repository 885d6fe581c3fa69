"""BERT (Devlin et al. 2019) on concatenated samples, without padding.

Modules and parameters have the names of transformers' BertForPreTraining, so weights map one to
one. The decoder of the masked-language-model head is the word embedding.

Shapes: T tokens of the micro-batch, P predicted tokens, N samples, E hidden size, F feed-forward
size, V rows of the vocabulary table.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastrata_workloads.bert.objective import BertBatch
from elastrata_workloads.bert.shape import BertShape
from elastrata_workloads.unpadded.attention import SelfAttention
from elastrata_workloads.unpadded.batch import Segments
from elastrata_workloads.unpadded.block import FUNCTIONS
from elastrata_workloads.unpadded.dropout import HiddenDropout, layer_keys
from elastrata_workloads.unpadded.loss import mask_logits_without_ids


class BertModel(nn.Module):
    """BERT: trunk and heads."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.shape = shape
        self.bert = Trunk(shape)
        self.cls = Heads(shape)
        self.initialize()

    def forward(self, batch: BertBatch) -> tuple[Tensor, Tensor | None]:
        """Return the logits of the predicted tokens, and of next-sentence prediction or None.

        Returns:
            Shapes [P, V], see `mask_logits_without_ids`, and [N, 2].
        """
        return logits(self, self.bert(batch), batch)

    @torch.no_grad()
    def initialize(self) -> None:
        """Initialise all parameters from torch's current generator, as transformers does."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0.0, self.shape.initializer_range)
            if isinstance(module, nn.LayerNorm):
                module.weight.fill_(1.0)
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.bias.zero_()
        # As transformers' `padding_idx` does.
        self.bert.embeddings.word_embeddings.weight[self.shape.pad_id].zero_()
        self.cls.predictions.bias.zero_()


def logits(model: Any, hidden: Tensor, batch: BertBatch) -> tuple[Tensor, Tensor | None]:
    """Return the logits of `BertModel.forward` from the last hidden states."""
    words = model.bert.embeddings.word_embeddings.weight
    rows = model.cls.predictions(hidden.index_select(0, batch.predicted), words)
    logits = mask_logits_without_ids(rows, model.shape.num_ids)
    if model.bert.pooler is None or model.cls.seq_relationship is None:
        return logits, None
    if batch.sample_starts is None:
        raise ValueError("next-sentence prediction needs a batch of sentence pairs")
    pooled = model.bert.pooler(hidden.index_select(0, batch.sample_starts))
    return logits, model.cls.seq_relationship(pooled)


class Trunk(nn.Module):
    """Embeddings, blocks, and the pooler for next-sentence prediction."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.embeddings = Embeddings(shape)
        self.encoder = Encoder(shape)
        self.pooler = Pooler(shape.hidden_size) if shape.next_sentence else None

    def forward(self, batch: BertBatch) -> Tensor:
        """Return the last block's output, shape [T, E]."""
        hidden: Tensor = self.embeddings(
            batch.input_ids, batch.positions, batch.token_types, batch.dropout_keys
        )
        segments = batch.segments
        for index, block in enumerate(self.encoder.layer):
            hidden = block(hidden, segments, layer_keys(batch.dropout_keys, index))
        return hidden


class Embeddings(nn.Module):
    """Sum of word, position and sentence embeddings, normalised."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.num_embeddings, shape.hidden_size)
        self.position_embeddings = nn.Embedding(shape.max_positions, shape.hidden_size)
        self.token_type_embeddings = nn.Embedding(2, shape.hidden_size)
        self.LayerNorm = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)
        self.dropout = HiddenDropout(shape.dropout, site=0)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        token_types: Tensor | None,
        dropout_keys: Tensor | None,
    ) -> Tensor:
        """Map ids of shape [T] to shape [T, E]; without token types all tokens have type 0."""
        if token_types is None:
            sentences = self.token_type_embeddings(input_ids.new_zeros(1))
        else:
            sentences = self.token_type_embeddings(token_types)
        words = self.word_embeddings(input_ids) + sentences
        hidden = self.LayerNorm(words + self.position_embeddings(positions))
        out: Tensor = self.dropout(hidden, dropout_keys)
        return out


class Encoder(nn.Module):
    """The stack of blocks."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))


class Block(nn.Module):
    """Attention, then feed-forward, each with a residual connection and a norm after it."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.intermediate = Intermediate(shape)
        self.output = AddNorm(shape, shape.intermediate_size, site=2)

    def forward(self, hidden: Tensor, segments: Segments, dropout_keys: Tensor | None) -> Tensor:
        """Map shape [T, E] to [T, E]."""
        hidden = self.attention(hidden, segments, dropout_keys)
        out: Tensor = self.output(self.intermediate(hidden), hidden, dropout_keys)
        return out


class Attention(nn.Module):
    """Self-attention with its output projection."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.self = SelfAttention(shape.self_attention)
        self.output = AddNorm(shape, shape.hidden_size, site=1)

    def forward(self, hidden: Tensor, segments: Segments, dropout_keys: Tensor | None) -> Tensor:
        """Map shape [T, E] to [T, E]."""
        out: Tensor = self.output(self.self(hidden, segments), hidden, dropout_keys)
        return out


class Intermediate(nn.Module):
    """The expanding half of the feed-forward."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.hidden_size, shape.intermediate_size)
        self.activation = FUNCTIONS[shape.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape [T, E] to [T, F]."""
        return self.activation(self.dense(hidden))


class AddNorm(nn.Module):
    """A projection, added to the residual and normalised."""

    def __init__(self, shape: BertShape, num_inputs: int, site: int) -> None:
        super().__init__()
        self.dense = nn.Linear(num_inputs, shape.hidden_size)
        self.LayerNorm = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)
        self.dropout = HiddenDropout(shape.dropout, site)

    def forward(self, inputs: Tensor, residual: Tensor, dropout_keys: Tensor | None) -> Tensor:
        """Map shapes [T, num_inputs] and [T, E] to [T, E]."""
        added = self.dropout(self.dense(inputs), dropout_keys) + residual
        out: Tensor = self.LayerNorm(added)
        return out


class Pooler(nn.Module):
    """Projection of a sample's first token, which represents the sample."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        """Map shape [N, E] to [N, E]."""
        return torch.tanh(self.dense(first))


class Heads(nn.Module):
    """Heads for masked tokens and, optionally, for next-sentence prediction."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.predictions = PredictionHead(shape)
        self.seq_relationship = nn.Linear(shape.hidden_size, 2) if shape.next_sentence else None


class PredictionHead(nn.Module):
    """The masked-language-model head, whose decoder is the word embedding."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.transform = Transform(shape)
        self.bias = nn.Parameter(torch.zeros(shape.num_embeddings))

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        """Return logits of shape [P, V] from [P, E] and the table [V, E]."""
        return F.linear(self.transform(hidden), words, self.bias)


class Transform(nn.Module):
    """The dense layer before the decoder."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.LayerNorm = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)
        self.activation = FUNCTIONS[shape.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        """Map shape [P, E] to [P, E]."""
        out: Tensor = self.LayerNorm(self.activation(self.dense(hidden)))
        return out
