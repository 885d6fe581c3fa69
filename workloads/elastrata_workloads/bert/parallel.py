"""How a plain BERT is taken apart: the units of sharding, checkpointing and compilation, the plan
of tensor parallelism, and the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from elastrata_workloads.bert.model import BertModel
from elastrata_workloads.bert.shape import BertShape
from elastrata_workloads.bert.stage import BertStage
from elastrata_workloads.unpadded.tensor_parallel import (
    OwnKeys,
    Replicated,
    between,
    divide,
    embedding_style,
    hidden_layout,
    norm_style,
    tied_head_style,
)

_BLOCK = "bert.encoder.layer.*"


def blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of a model or of a stage, first to last.

    Raises:
        TypeError: not a BERT.
    """
    if isinstance(model, BertStage):
        return model.blocks
    return list(_bert(model).bert.encoder.layer)


def stage(model: nn.Module, numbers: Sequence[int]) -> BertStage:
    """The part of a model with these blocks; see `Workload.stage`.

    Raises:
        TypeError: not a BERT.
    """
    return BertStage(_bert(model), numbers)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Divides heads, feed-forwards and the vocabulary over `mesh`, an axis; see
    `Workload.tensor_parallel`.

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
