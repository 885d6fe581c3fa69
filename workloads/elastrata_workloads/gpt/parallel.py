"""A plain GPT taken apart: the units of sharding, checkpointing and compilation, the plan of tensor
parallelism, and the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from elastrata_workloads.gpt.batch import GptBatch
from elastrata_workloads.gpt.model import GptModel, logits
from elastrata_workloads.gpt.shape import GptShape
from elastrata_workloads.unpadded.dropout import layer_keys
from elastrata_workloads.unpadded.tensor_parallel import (
    OwnKeys,
    Replicated,
    between,
    divide,
    embedding_style,
    head_style,
    heads_norm_style,
    hidden_layout,
    norm_style,
    tied_head_style,
)


class GptStage(nn.Module):
    """Some blocks of a model under the names they have there; with the embeddings where the first
    is among them, with norm and head where the last one is.

    A head that is the token embedding has that table with it.

    Args:
        model: whose modules it takes.
        blocks: numbers from 0.
    """

    def __init__(self, model: GptModel, blocks: Sequence[int]) -> None:
        super().__init__()
        self.shape = model.shape
        self.is_first, self.is_last = 0 in blocks, len(model.blocks) - 1 in blocks
        if self.is_first:
            self.embeddings: nn.Module = model.embeddings
        elif self.is_last and self.shape.tied_embeddings:
            self.embeddings = nn.ModuleDict({"tokens": model.embeddings.tokens})
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in blocks})
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, batch: GptBatch, hidden: Tensor | None = None) -> Tensor:
        """Hidden states of shape [T, E] from those of the stage before, which the first stage does
        without; logits as `GptModel` with the last block."""
        if hidden is None:
            hidden = self.embeddings(batch.input_ids, batch.positions, batch.dropout_keys)
        segments = batch.segments
        for number, block in self.blocks.items():
            keys = layer_keys(batch.dropout_keys, int(number))
            hidden = block(hidden, segments, batch.positions, keys)
        return logits(self, hidden, batch) if self.is_last else hidden


def blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of a model or of a stage, first to last.

    Raises:
        TypeError: not a GPT.
    """
    if isinstance(model, GptStage):
        return list(model.blocks.values())
    return list(_gpt(model).blocks)


def stage(model: nn.Module, numbers: Sequence[int]) -> GptStage:
    """The part of a model with these blocks, as `PipelineParallel.stage` has it.

    Raises:
        TypeError: not a GPT.
    """
    return GptStage(_gpt(model), numbers)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Divides heads, feed-forwards and the vocabulary over `mesh`, an axis, for
    `TensorParallel.tensor_parallel`.

    As in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053; sequence parallelism: Korthikanti et
    al. 2022, arXiv 2205.05198). Logits stay divided over the vocabulary where it is.

    Raises:
        TypeError: not a GPT.
    """
    shape = _gpt(model).shape
    plan = _plan(shape, mesh.size(), sequence=sequence)
    divide(model, blocks(model), mesh, plan, sequence=sequence)


def _plan(shape: GptShape, size: int, *, sequence: bool) -> dict[str, ParallelStyle]:
    layout = hidden_layout(sequence)
    head = tied_head_style if shape.tied_embeddings else head_style
    plan: dict[str, ParallelStyle] = {
        "embeddings.tokens": embedding_style(shape.num_embeddings, size),
        "blocks.*.attention_norm": norm_style(sequence),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(layout, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=layout),
        "blocks.*.feed_forward_norm": norm_style(sequence),
        "blocks.*.feed_forward": PrepareModuleInput(
            input_layouts=(layout,), desired_input_layouts=(Replicate(),)
        ),
        "blocks.*.feed_forward.up": ColwiseParallel(),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=layout),
        "norm": Replicated(),
        "head": head(shape.num_embeddings, size),
    }
    if shape.positions == "learned":
        plan["embeddings.positions"] = Replicated()
    if shape.qk_norm:
        plan["blocks.*.attention.query_norm"] = heads_norm_style()
        plan["blocks.*.attention.key_norm"] = heads_norm_style()
    if shape.activation == "swiglu":
        plan["blocks.*.feed_forward.gate"] = ColwiseParallel()
    if sequence:
        plan["embeddings"] = between(Replicate(), Shard(0))
        plan["blocks.*.attention_dropout"] = OwnKeys()
        plan["blocks.*.feed_forward_dropout"] = OwnKeys()
        plan[f"blocks.{shape.num_layers - 1}"] = between(Shard(0), Replicate())
    return plan


def _gpt(model: nn.Module) -> GptModel:
    if not isinstance(model, GptModel):
        raise TypeError(f"expected a GptModel, got {type(model).__name__}")
    return model
