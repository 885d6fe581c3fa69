"""Parallel BERT: its blocks, its tensor-parallel plan and its pipeline stages.

Blocks are the units of sharding, activation checkpointing and compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from elastrata_workloads.bert.model import BertModel, Trunk, logits
from elastrata_workloads.bert.objective import BertBatch
from elastrata_workloads.bert.shape import BertShape
from elastrata_workloads.unpadded.dropout import layer_keys
from elastrata_workloads.unpadded.tensor_parallel import (
    LocalDropoutKeys,
    Replicated,
    embedding_style,
    heads_norm_style,
    hidden_layout,
    norm_style,
    redistribute_style,
    shard_model,
    style_of_tied_head,
)

_BLOCK = "bert.encoder.layer.*"


class BertStage(nn.Module):
    """A pipeline stage: some blocks of a model, with the parameter names of the whole model.

    The stage with the first block also has the embeddings. The stage with the last one has the
    heads, and with them the table of word embeddings, which is their decoder.
    """

    def __init__(self, model: BertModel, blocks: Sequence[int]) -> None:
        super().__init__()
        self.shape = model.shape
        self.is_last = len(model.bert.encoder.layer) - 1 in blocks
        self.bert = TrunkStage(model.bert, blocks, is_last=self.is_last)
        if self.is_last:
            self.cls = model.cls

    def forward(
        self, batch: BertBatch, hidden: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return hidden states of shape [T, E], or the logits of `BertModel` in the last stage.

        `hidden` is the previous stage's output; the first stage has none.
        """
        hidden = self.bert(batch, hidden)
        return logits(self, hidden, batch) if self.is_last else hidden

    @property
    def blocks(self) -> list[nn.Module]:
        """The stage's blocks, in order."""
        return list(self.bert.blocks.values())


class TrunkStage(nn.Module):
    """A stage's part of the trunk."""

    def __init__(self, trunk: Trunk, blocks: Sequence[int], *, is_last: bool) -> None:
        super().__init__()
        if 0 in blocks:
            self.embeddings: nn.Module = trunk.embeddings
        elif is_last:
            # The decoder is tied to the word embeddings, so the last stage needs that table, too.
            table = trunk.embeddings.word_embeddings
            self.embeddings = nn.ModuleDict({"word_embeddings": table})
        layer = nn.ModuleDict({str(number): trunk.encoder.layer[number] for number in blocks})
        self.encoder = nn.ModuleDict({"layer": layer})
        self.pooler = trunk.pooler if is_last else None

    def forward(self, batch: BertBatch, hidden: Tensor | None) -> Tensor:
        """Return shape [T, E]; `hidden` is the previous stage's output, or None."""
        if hidden is None:
            hidden = self.embeddings(
                batch.input_ids, batch.positions, batch.token_types, batch.dropout_keys
            )
        segments = batch.segments
        for number, block in self.blocks.items():
            hidden = block(hidden, segments, layer_keys(batch.dropout_keys, int(number)))
        return hidden

    @property
    def blocks(self) -> nn.ModuleDict:
        """The stage's blocks, by number."""
        return cast(nn.ModuleDict, self.encoder["layer"])


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks of a model or of a stage, first to last.

    Raises:
        TypeError: the model is not a BERT.
    """
    if isinstance(model, BertStage):
        return model.blocks
    return list(_bert(model).bert.encoder.layer)


def stage(model: nn.Module, numbers: Sequence[int]) -> BertStage:
    """Return the part of a model with these blocks, for `PipelineParallel.stage`.

    Raises:
        TypeError: the model is not a BERT.
    """
    return BertStage(_bert(model), numbers)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Shard heads, feed-forwards and vocabulary over `mesh`, a mesh of one axis.

    As in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053; sequence parallelism: Korthikanti et
    al. 2022, arXiv 2205.05198). If the vocabulary is sharded, so are the logits.

    Raises:
        TypeError: the model is not a BERT.
    """
    shape = _bert(model).shape
    plan = _plan(shape, mesh.size(), sequence=sequence)
    shard_model(model, blocks(model), mesh, plan, sequence=sequence)


def _plan(shape: BertShape, size: int, *, sequence: bool) -> dict[str, ParallelStyle]:
    layout = hidden_layout(sequence)
    plan: dict[str, ParallelStyle] = {
        "bert.embeddings.word_embeddings": embedding_style(shape.num_embeddings, size),
        "bert.embeddings.position_embeddings": Replicated(),
        "bert.embeddings.token_type_embeddings": Replicated(),
        "bert.embeddings.LayerNorm": Replicated(),
        f"{_BLOCK}.attention.self": PrepareModuleInput(
            input_layouts=(layout, None), desired_input_layouts=(Replicate(), None)
        ),
        f"{_BLOCK}.attention.self.query": ColwiseParallel(),
        f"{_BLOCK}.attention.self.key": ColwiseParallel(),
        f"{_BLOCK}.attention.self.value": ColwiseParallel(),
        f"{_BLOCK}.attention.output.dense": RowwiseParallel(output_layouts=layout),
        f"{_BLOCK}.attention.output.LayerNorm": norm_style(sequence),
        f"{_BLOCK}.intermediate.dense": ColwiseParallel(input_layouts=layout),
        f"{_BLOCK}.output.dense": RowwiseParallel(output_layouts=layout),
        f"{_BLOCK}.output.LayerNorm": norm_style(sequence),
        "cls.predictions": style_of_tied_head(shape.num_embeddings, size),
    }
    if shape.next_sentence:
        plan["bert.pooler"] = Replicated()
        plan["cls.seq_relationship"] = Replicated()
    if shape.qk_norm:
        plan[f"{_BLOCK}.attention.self.query_norm"] = heads_norm_style()
        plan[f"{_BLOCK}.attention.self.key_norm"] = heads_norm_style()
    # Between embeddings and the last block's output each rank holds a shard of the tokens.
    if sequence:
        plan["bert.embeddings"] = redistribute_style(Replicate(), Shard(0))
        plan[f"{_BLOCK}.attention.output.dropout"] = LocalDropoutKeys()
        plan[f"{_BLOCK}.output.dropout"] = LocalDropoutKeys()
        plan[f"bert.encoder.layer.{shape.num_layers - 1}"] = redistribute_style(
            Shard(0), Replicate()
        )
    return plan


def _bert(model: nn.Module) -> BertModel:
    if not isinstance(model, BertModel):
        raise TypeError(f"expected a BertModel, got {type(model).__name__}")
    return model
