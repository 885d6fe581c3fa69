"""Tensor parallelism: a sharded embedding, and the parallel styles of all modules.

Letters: T tokens of the micro-batch, V rows of the table, R rows of one rank, V / number of ranks,
E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    SequenceParallel,
    parallelize_module,
)

from elastrata_workloads.unpadded.batch import UnpaddedBatch
from elastrata_workloads.unpadded.dropout import HiddenDropout

_ROWS = 0
"""The sharded dimension of the table."""


# torch's `RowwiseParallel` computes the gradient of the whole table on every rank; this style
# computes only the gradient of the rank's rows.
class ShardedEmbedding(ParallelStyle):
    """Shards the rows of an `nn.Embedding` equally over all ranks.

    As in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3): each rank looks up the ids
    of its rows, and one all-reduce sums the hidden states. Ids and hidden states are plain tensors,
    replicated on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise TypeError(f"expected an Embedding, got {type(module).__name__}")
        divided = distribute_module(module, device_mesh, self._divided)
        # Set on the instance: the module stays an `nn.Embedding`, which optimizers and exports
        # recognise.
        vars(divided)["forward"] = partial(_look_up, divided)
        return divided

    def _divided(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, table in list(module.named_parameters(recurse=False)):
            rows = distribute_tensor(table, mesh, [Shard(_ROWS)], src_data_rank=self.src_data_rank)
            setattr(module, name, nn.Parameter(rows, requires_grad=table.requires_grad))


def _look_up(module: nn.Module, ids: Tensor) -> Tensor:
    """Map ids of shape [T] to hidden states of shape [T, E]. Collective over the ranks."""
    table: Any = module.weight
    if not isinstance(table, DTensor):
        raise TypeError(f"expected a divided table, got {type(table).__name__}")
    mesh, rows = table.device_mesh, table.to_local()
    own = ids - mesh.get_local_rank() * rows.shape[_ROWS]
    hidden: Tensor = _Lookup.apply(rows, own, mesh.get_group())  # type: ignore[no-untyped-call]
    return hidden


class _Lookup(torch.autograd.Function):
    """Lookup in a table whose rows are sharded over ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return hidden states of shape [T, E], the same on every rank."""
        # Ids of other ranks look up row 0 and are zeroed, so that shapes are the same on every
        # rank.
        is_elsewhere = (ids < 0) | (ids >= rows.shape[_ROWS])
        ids = ids.masked_fill(is_elsewhere, 0)
        hidden = F.embedding(ids, rows).masked_fill_(is_elsewhere[..., None], 0.0)
        # Every id belongs to exactly one rank, so the sum is the lookup.
        dist.all_reduce(hidden, group=group)
        ctx.save_for_backward(ids, is_elsewhere)
        ctx.num_rows = rows.shape[_ROWS]
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of this rank's rows."""
        ids, is_elsewhere = ctx.saved_tensors
        of_own = gradients[0].masked_fill(is_elsewhere[..., None], 0.0)
        never = -1  # no padding id, whose row would get no gradient
        table = torch.ops.aten.embedding_dense_backward(of_own, ids, ctx.num_rows, never, False)
        return table, None, None


_TOKENS, _HEADS, _VOCABULARY = 0, 1, 1
"""Dimensions: tokens in hidden states, heads in queries and keys, ids in logits."""


def shard_model(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle],
    *,
    sequence: bool,
) -> None:
    """Shard a model's parameters over one mesh axis, and with `sequence` also the tokens.

    Args:
        model: plain, with the same weights on every rank; called with an `UnpaddedBatch`.
        blocks: the model's blocks.
        mesh: a mesh of one axis.
        plan: the style of every module that has parameters or needs its inputs redistributed.
        sequence: whether the plan shards tokens; batches are then filled up to a multiple of the
            mesh size.
    """
    # `src_data_rank=None`: all ranks already have the same weights, so nothing is broadcast.
    parallelize_module(model, mesh, dict(plan), src_data_rank=None)
    if sequence:
        # Every rank must get the same number of tokens.
        model.register_forward_pre_hook(lambda _, inputs: _fill_batch(inputs, mesh.size()))
    for module in (*blocks, model):
        module.register_forward_hook(lambda _, inputs, output: _without_views(output))


def hidden_layout(sequence: bool) -> Placement:
    """Return the placement of hidden states between the modules of a block."""
    return Shard(_TOKENS) if sequence else Replicate()


def norm_style(sequence: bool) -> ParallelStyle:
    """Return the style of a norm inside a block."""
    if sequence:
        return SequenceParallel(sequence_dim=_TOKENS, use_local_output=True)
    return Replicated()


def heads_norm_style() -> ParallelStyle:
    """Return the style of a per-head norm, on inputs of shape [T, H, D].

    Each rank has some of the heads; the weight's gradient is the sum over all ranks.
    """
    return SequenceParallel(sequence_dim=_HEADS, use_local_output=True)


def embedding_style(num_rows: int, size: int) -> ParallelStyle:
    """Return the style of the vocabulary table.

    The table is sharded if its rows divide evenly over `size` ranks, else replicated.
    """
    # Uneven shards are unsupported; see the recipe key `embedding_multiple`.
    if num_rows % size:
        return Replicated()
    return ShardedEmbedding()


def style_of_tied_head(num_rows: int, size: int) -> ParallelStyle:
    """Return the style of a tied head: sharded if the vocabulary table is."""
    return Replicated() if num_rows % size else ShardedLogits()


def head_style(num_rows: int, size: int) -> ParallelStyle:
    """Return the style of an untied head, a matrix of `num_rows` rows."""
    if num_rows % size:
        return Replicated()
    # A DTensor output, which shows the loss that the columns are sharded.
    return ColwiseParallel(output_layouts=Shard(_VOCABULARY), use_local_output=False)


def redistribute_style(source: Placement, target: Placement) -> ParallelStyle:
    """Return a style that moves a module's output from one placement to another."""
    return PrepareModuleOutput(output_layouts=source, desired_output_layouts=target)


class Replicated(ParallelStyle):
    """Computes the same on every rank: parameters, inputs and output are replicated.

    Parameters become DTensors all the same, so that gradient norms and optimizers see one kind of
    parameter. If an input is a sharded DTensor, the computation is sharded, too.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # torch types hooks as returning None, but uses their return values.
        hooks: tuple[Any, Any] = (_replicate_inputs, _gather_output)
        return distribute_module(module, device_mesh, _replicate, *hooks)


class ShardedLogits(Replicated):
    """A head with a sharded vocabulary table. Its logits of shape [P, V] stay sharded over V.

    See `loss.py` for the loss of such logits.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hooks: tuple[Any, Any] = (_replicate_inputs, _shard_output)
        return distribute_module(module, device_mesh, _replicate, *hooks)


class LocalDropoutKeys(ParallelStyle):
    """Gives a dropout on the rank's shard of the tokens the dropout keys of that shard."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, HiddenDropout):
            raise TypeError(f"expected a HiddenDropout, got {type(module).__name__}")
        rank, size = device_mesh.get_local_rank(), device_mesh.size()

        def select_own_keys(
            _: nn.Module, inputs: tuple[Tensor, Tensor | None]
        ) -> tuple[Tensor, Tensor | None]:
            hidden, keys = inputs
            return hidden, None if keys is None else keys.chunk(size)[rank]

        module.register_forward_pre_hook(select_own_keys)
        return module


def _fill_batch(inputs: tuple[Any, ...], multiple: int) -> tuple[Any, ...]:
    batch, *others = inputs
    if not isinstance(batch, UnpaddedBatch):
        raise TypeError(f"expected an UnpaddedBatch, got {type(batch).__name__}")
    return batch.filled(multiple), *others


class _NotAView(torch.autograd.Function):
    """Identity without a copy, whose output is not a view."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _without_views(output: Any) -> Any:
    """Return the output as tensors that are not views."""
    # `DTensor.to_local` returns views, and FSDP2 warns about modules that return views.
    if isinstance(output, tuple):
        return tuple(map(_without_views, output))
    is_plain = isinstance(output, Tensor) and not isinstance(output, DTensor)
    return _NotAView.apply(output) if is_plain else output  # type: ignore[no-untyped-call]


def _replicate(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        # `run_check=False` skips a broadcast: the weights are the same on every rank.
        whole = DTensor.from_local(parameter.data, mesh, [Replicate()], run_check=False)
        setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _replicate_inputs(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    return tuple(
        DTensor.from_local(value, mesh, [Replicate()], run_check=False)
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
        else value
        for value in inputs
    )


def _gather_output(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.redistribute(mesh, [Replicate()]).to_local()


def _shard_output(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.redistribute(mesh, [Shard(_VOCABULARY)])
