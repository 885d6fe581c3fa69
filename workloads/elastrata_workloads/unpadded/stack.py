"""A model of embeddings, equal blocks, a norm and a head; whole, or cut into stages.

Shapes: T tokens of the micro-batch, P predicted tokens, E hidden size, V rows of the vocabulary's
table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from elastrata_workloads.unpadded.batch import UnpaddedBatch
from elastrata_workloads.unpadded.dropout import HiddenDropout, layer_keys
from elastrata_workloads.unpadded.logits import of_ids
from elastrata_workloads.unpadded.norm import NormShape


class Embeddings(nn.Module):
    """Token embeddings, with learned positions added and normalised where the model has that.

    Args:
        num_rows: of the vocabulary's table.
        hidden_size: of the residual stream.
        num_positions: rows of the table of positions; 0: there is none.
        norm: of the sum; None: there is none.
        dropout: of what comes out.
    """

    def __init__(
        self,
        num_rows: int,
        hidden_size: int,
        *,
        num_positions: int = 0,
        norm: NormShape | None = None,
        dropout: float,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_rows, hidden_size)
        self.positions = nn.Embedding(num_positions, hidden_size) if num_positions else None
        self.norm = norm.over(hidden_size) if norm else None
        self.dropout = HiddenDropout(dropout, site=0)

    def forward(self, input_ids: Tensor, positions: Tensor, dropout_keys: Tensor | None) -> Tensor:
        """Shape [T, E] from ids and positions of shape [T]."""
        hidden: Tensor = self.tokens(input_ids)
        if self.positions is not None:
            hidden = hidden + self.positions(positions)
        if self.norm is not None:
            hidden = self.norm(hidden)
        out: Tensor = self.dropout(hidden, dropout_keys)
        return out


class Stack(nn.Module):
    """A whole model. Who derives from it makes `embeddings`, `blocks`, `norm` and `head`.

    Args:
        num_ids: the first so many rows of the vocabulary's table are ids.
        is_tied: whether the head is given that table.
    """

    embeddings: Embeddings
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Module

    def __init__(self, *, num_ids: int, is_tied: bool) -> None:
        super().__init__()
        self.num_ids, self.is_tied = num_ids, is_tied

    def forward(self, batch: UnpaddedBatch) -> Tensor:
        """Logits of the predicted tokens, shape [P, V]; see `of_ids`."""
        hidden = self.embeddings(batch.input_ids, batch.positions, batch.dropout_keys)
        segments = batch.segments
        for index, block in enumerate(self.blocks):
            keys = layer_keys(batch.dropout_keys, index)
            hidden = block(hidden, segments, batch.positions, keys)
        return _logits(self, hidden, batch)


class StackStage(nn.Module):
    """Some blocks of a model under the names they have there; with the embeddings where the first
    is among them, with norm and head where the last one is.

    A tied head has the table of the vocabulary with it.

    Args:
        model: whose modules it takes.
        blocks: numbers from 0.
    """

    def __init__(self, model: Stack, blocks: Sequence[int]) -> None:
        super().__init__()
        self.num_ids, self.is_tied = model.num_ids, model.is_tied
        self.is_last = len(model.blocks) - 1 in blocks
        if 0 in blocks:
            self.embeddings: nn.Module = model.embeddings
        elif self.is_last and self.is_tied:
            self.embeddings = nn.ModuleDict({"tokens": model.embeddings.tokens})
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in blocks})
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, batch: UnpaddedBatch, hidden: Tensor | None = None) -> Tensor:
        """Hidden states of shape [T, E] from those of the stage before, which the first stage does
        without; logits as `Stack` with the last block."""
        if hidden is None:
            hidden = self.embeddings(batch.input_ids, batch.positions, batch.dropout_keys)
        segments = batch.segments
        for number, block in self.blocks.items():
            keys = layer_keys(batch.dropout_keys, int(number))
            hidden = block(hidden, segments, batch.positions, keys)
        return _logits(self, hidden, batch) if self.is_last else hidden


class TiedHead(nn.Module):
    """The head that is the token embedding; a module, so that parallelism has a place to act."""

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Logits of shape [P, V] from [P, E] and the table [V, E]."""
        return F.linear(hidden, tokens)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model or of a stage, first to last.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(model, StackStage):
        return list(model.blocks.values())
    return list(whole(model).blocks)


def whole(model: nn.Module) -> Stack:
    """The model, as what it is.

    Raises:
        TypeError: it is none of these.
    """
    if not isinstance(model, Stack):
        raise TypeError(f"expected a Stack, got {type(model).__name__}")
    return model


def _logits(model: Any, hidden: Tensor, batch: UnpaddedBatch) -> Tensor:
    """Logits, as of `Stack.forward`, from the last hidden states."""
    hidden = model.norm(hidden.index_select(0, batch.predicted))
    table = [model.embeddings.tokens.weight] if model.is_tied else []
    return of_ids(model.head(hidden, *table), model.num_ids)
