"""A model of embeddings, identical blocks, a norm and a head, whole or split into stages.

Shapes: T tokens of the micro-batch, P predicted tokens, E hidden size, V rows of the vocabulary
table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from elastrata_workloads.unpadded.batch import UnpaddedBatch
from elastrata_workloads.unpadded.dropout import HiddenDropout, layer_keys
from elastrata_workloads.unpadded.loss import mask_logits_without_ids
from elastrata_workloads.unpadded.shapes import NormShape
from elastrata_workloads.unpadded.tensor_parallel import (
    LocalDropoutKeys,
    Replicated,
    embedding_style,
    head_style,
    heads_norm_style,
    hidden_layout,
    norm_style,
    redistribute_style,
    style_of_tied_head,
)


class Embeddings(nn.Module):
    """Token embeddings, with optional learned positions and norm.

    Args:
        num_rows: rows of the vocabulary table.
        hidden_size: width of the residual stream.
        num_positions: rows of the position table; 0: no table.
        norm: norm of the sum; None: no norm.
        dropout: dropout rate of the output.
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
        """Map ids and positions of shape [T] to shape [T, E]."""
        hidden: Tensor = self.tokens(input_ids)
        if self.positions is not None:
            hidden = hidden + self.positions(positions)
        if self.norm is not None:
            hidden = self.norm(hidden)
        out: Tensor = self.dropout(hidden, dropout_keys)
        return out


class Stack(nn.Module):
    """A whole model. Subclasses set `embeddings`, `blocks`, `norm` and `head`."""

    embeddings: Embeddings
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Module

    def __init__(self, *, num_ids: int, is_tied: bool) -> None:
        super().__init__()
        self.num_ids, self.is_tied = num_ids, is_tied

    def forward(self, batch: UnpaddedBatch) -> Tensor:
        """Return the logits of the predicted tokens, shape [P, V], as `mask_logits_without_ids`
        leaves them."""
        hidden = self.embeddings(batch.input_ids, batch.positions, batch.dropout_keys)
        segments = batch.segments
        for index, block in enumerate(self.blocks):
            keys = layer_keys(batch.dropout_keys, index)
            hidden = block(hidden, segments, batch.positions, keys)
        return _logits(self, hidden, batch)


class StackStage(nn.Module):
    """A pipeline stage: some blocks of a model, with the parameter names of the whole model.

    The stage with the first block also has the embeddings; the stage with the last one has norm and
    head. A tied head comes with the vocabulary table.
    """

    def __init__(self, model: Stack, blocks: Sequence[int]) -> None:
        super().__init__()
        self.num_ids, self.is_tied = model.num_ids, model.is_tied
        self.is_last = len(model.blocks) - 1 in blocks
        if 0 in blocks:
            self.embeddings: nn.Module = model.embeddings
        elif self.is_last and self.is_tied:
            # Under the name of the whole model, so that checkpoints and exports need no mapping.
            self.embeddings = nn.ModuleDict({"tokens": model.embeddings.tokens})
        # Keys are block numbers, so that parameter names equal those of `nn.ModuleList`.
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in blocks})
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, batch: UnpaddedBatch, hidden: Tensor | None = None) -> Tensor:
        """Return hidden states of shape [T, E], or the logits of `Stack` in the last stage.

        `hidden` is the previous stage's output; the first stage has none.
        """
        if hidden is None:
            hidden = self.embeddings(batch.input_ids, batch.positions, batch.dropout_keys)
        segments = batch.segments
        for number, block in self.blocks.items():
            keys = layer_keys(batch.dropout_keys, int(number))
            hidden = block(hidden, segments, batch.positions, keys)
        return _logits(self, hidden, batch) if self.is_last else hidden


# A module without parameters, so that a parallel style can be attached to it.
class TiedHead(nn.Module):
    """Head that uses the token embedding as its weight."""

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return logits of shape [P, V] from [P, E] and the table [V, E]."""
        return F.linear(hidden, tokens)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model or of a stage, first to last.

    Raises:
        TypeError: the model is neither.
    """
    if isinstance(model, StackStage):
        return list(model.blocks.values())
    return list(as_stack(model).blocks)


def as_stack(model: nn.Module) -> Stack:
    """Return the model, checked to be a `Stack`.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(model, Stack):
        raise TypeError(f"expected a Stack, got {type(model).__name__}")
    return model


def _logits(model: Any, hidden: Tensor, batch: UnpaddedBatch) -> Tensor:
    """Return the logits of `Stack.forward` from the last hidden states."""
    # Norm and head run only on predicted tokens: a small part of them with masked tokens.
    hidden = model.norm(hidden.index_select(0, batch.predicted))
    table = [model.embeddings.tokens.weight] if model.is_tied else []
    return mask_logits_without_ids(model.head(hidden, *table), model.num_ids)


def tensor_parallel_plan(model: Stack, size: int, *, sequence: bool) -> dict[str, ParallelStyle]:
    """Return the parallel style of every module, which shards heads, feed-forwards and vocabulary.

    As in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053; sequence parallelism: Korthikanti et
    al. 2022, arXiv 2205.05198). If the vocabulary is sharded, so are the logits.
    """
    layout, names = hidden_layout(sequence), {name for name, _ in model.named_modules()}
    num_rows = model.embeddings.tokens.num_embeddings
    styles: dict[str, ParallelStyle] = {
        "embeddings.tokens": embedding_style(num_rows, size),
        "embeddings.positions": Replicated(),
        "embeddings.norm": Replicated(),
        **{f"blocks.*.{name}": style for name, style in _block_styles(layout, sequence).items()},
        "norm": Replicated(),
        "head": (style_of_tied_head if model.is_tied else head_style)(num_rows, size),
    }
    if sequence:
        # Between embeddings and the last block's output each rank holds a shard of the tokens.
        styles["embeddings"] = redistribute_style(Replicate(), Shard(0))
        styles[f"blocks.{len(model.blocks) - 1}"] = redistribute_style(Shard(0), Replicate())
    # The plan names all modules that any model can have; torch warns about missing ones.
    return {name: style for name, style in styles.items() if name.replace("*", "0") in names}


def _block_styles(layout: Placement, sequence: bool) -> dict[str, ParallelStyle]:
    """Return the styles of all modules that a block can have."""
    styles: dict[str, ParallelStyle] = {
        "attention_norm": norm_style(sequence),
        "attention": PrepareModuleInput(
            input_layouts=(layout, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.query_norm": heads_norm_style(),
        "attention.key_norm": heads_norm_style(),
        "attention.output": RowwiseParallel(output_layouts=layout),
        "feed_forward_norm": norm_style(sequence),
        "feed_forward": PrepareModuleInput(
            input_layouts=(layout,), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=layout),
    }
    if sequence:
        styles |= {
            "attention_dropout": LocalDropoutKeys(),
            "feed_forward_dropout": LocalDropoutKeys(),
        }
    return styles
