"""A plain BERT taken apart: the units of sharding, checkpointing and compilation, the plan of
tensor parallelism, and the stages of a pipeline."""

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
    OwnKeys,
    Replicated,
    between,
    divide,
    embedding_style,
    heads_norm_style,
    hidden_layout,
    norm_style,
    tied_head_style,
)

_BLOCK = "bert.encoder.layer.*"


class BertStage(nn.Module):
    """Some blocks of a model under the names they have there; with the embeddings where the first
    is among them, with the heads where the last one is.

    The heads have the table of word embeddings with them, which is their decoder."""

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
        """Hidden states of shape [T, E] from those of the stage before, which the first stage does
        without; logits as `BertModel` with the last block."""
        hidden = self.bert(batch, hidden)
        return logits(self, hidden, batch) if self.is_last else hidden

    @property
    def blocks(self) -> list[nn.Module]:
        """In order."""
        return list(self.bert.blocks.values())


class TrunkStage(nn.Module):
    """A stage's part of the trunk."""

    def __init__(self, trunk: Trunk, blocks: Sequence[int], *, is_last: bool) -> None:
        super().__init__()
        if 0 in blocks:
            self.embeddings: nn.Module = trunk.embeddings
        elif is_last:
            table = trunk.embeddings.word_embeddings
            self.embeddings = nn.ModuleDict({"word_embeddings": table})
        layer = nn.ModuleDict({str(number): trunk.encoder.layer[number] for number in blocks})
        self.encoder = nn.ModuleDict({"layer": layer})
        self.pooler = trunk.pooler if is_last else None

    def forward(self, batch: BertBatch, hidden: Tensor | None) -> Tensor:
        """Shape [T, E]; `hidden` is what came from the stage before."""
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
        """By number."""
        return cast(nn.ModuleDict, self.encoder["layer"])


def blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of a model or of a stage, first to last.

    Raises:
        TypeError: not a BERT.
    """
    if isinstance(model, BertStage):
        return model.blocks
    return list(_bert(model).bert.encoder.layer)


def stage(model: nn.Module, numbers: Sequence[int]) -> BertStage:
    """The part of a model with these blocks, as `PipelineParallel.stage` has it.

    Raises:
        TypeError: not a BERT.
    """
    return BertStage(_bert(model), numbers)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Divides heads, feed-forwards and the vocabulary over `mesh`, an axis, for
    `TensorParallel.tensor_parallel`.

    As in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053; sequence parallelism: Korthikanti et
    al. 2022, arXiv 2205.05198). Logits stay divided over the vocabulary where it is.

    Raises:
        TypeError: not a BERT.
    """
    shape = _bert(model).shape
    plan = _plan(shape, mesh.size(), sequence=sequence)
    divide(model, blocks(model), mesh, plan, sequence=sequence)


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
        "cls.predictions": tied_head_style(shape.num_embeddings, size),
    }
    if shape.next_sentence:
        plan["bert.pooler"] = Replicated()
        plan["cls.seq_relationship"] = Replicated()
    if shape.qk_norm:
        plan[f"{_BLOCK}.attention.self.query_norm"] = heads_norm_style()
        plan[f"{_BLOCK}.attention.self.key_norm"] = heads_norm_style()
    if sequence:
        plan["bert.embeddings"] = between(Replicate(), Shard(0))
        plan[f"{_BLOCK}.attention.output.dropout"] = OwnKeys()
        plan[f"{_BLOCK}.output.dropout"] = OwnKeys()
        plan[f"bert.encoder.layer.{shape.num_layers - 1}"] = between(Shard(0), Replicate())
    return plan


def _bert(model: nn.Module) -> BertModel:
    if not isinstance(model, BertModel):
        raise TypeError(f"expected a BertModel, got {type(model).__name__}")
    return model
