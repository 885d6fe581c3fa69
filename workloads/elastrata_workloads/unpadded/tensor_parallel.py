"""An embedding whose table is divided, by rows, over ranks that compute a sample together.

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
"""The dim of the table that is divided."""


class DividedEmbedding(ParallelStyle):
    """Divides the rows of an `nn.Embedding`, of which every rank must get equally many.

    As in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3): each rank looks up the ids
    whose rows it has, and one all-reduce puts the hidden states together. Its part of the table's
    gradient is all that a rank computes: torch's `RowwiseParallel` makes that of the whole table
    on every rank. Ids and hidden states are plain tensors, whole on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise TypeError(f"expected an Embedding, got {type(module).__name__}")
        divided = distribute_module(module, device_mesh, self._divided)
        vars(divided)["forward"] = partial(_looked_up, divided)
        return divided

    def _divided(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, table in list(module.named_parameters(recurse=False)):
            rows = distribute_tensor(table, mesh, [Shard(_ROWS)], src_data_rank=self.src_data_rank)
            setattr(module, name, nn.Parameter(rows, requires_grad=table.requires_grad))


def _looked_up(module: nn.Module, ids: Tensor) -> Tensor:
    """Hidden states of shape [T, E] from ids of shape [T]. Collective over the ranks."""
    table: Any = module.weight
    if not isinstance(table, DTensor):
        raise TypeError(f"expected a divided table, got {type(table).__name__}")
    mesh, rows = table.device_mesh, table.to_local()
    own = ids - mesh.get_local_rank() * rows.shape[_ROWS]
    hidden: Tensor = _Lookup.apply(rows, own, mesh.get_group())  # type: ignore[no-untyped-call]
    return hidden


class _Lookup(torch.autograd.Function):
    """Rows of a table of which this rank has some, and others the others."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Shape [T, E], the same on every rank."""
        is_elsewhere = (ids < 0) | (ids >= rows.shape[_ROWS])
        ids = ids.masked_fill(is_elsewhere, 0)
        hidden = F.embedding(ids, rows).masked_fill_(is_elsewhere[..., None], 0.0)
        dist.all_reduce(hidden, group=group)
        ctx.save_for_backward(ids, is_elsewhere)
        ctx.num_rows = rows.shape[_ROWS]
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """This rank's rows have the gradients of the tokens that were looked up in them."""
        ids, is_elsewhere = ctx.saved_tensors
        of_own = gradients[0].masked_fill(is_elsewhere[..., None], 0.0)
        never = -1  # no id is left out, as that of padding would be
        table = torch.ops.aten.embedding_dense_backward(of_own, ids, ctx.num_rows, never, False)
        return table, None, None


_TOKENS, _HEADS, _VOCABULARY = 0, 1, 1
"""The dim of hidden states that counts tokens, that of queries and keys that counts heads, and that
of logits that counts ids."""


def divide(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle],
    *,
    sequence: bool,
) -> None:
    """Divides a model's parameters, and with `sequence` the tokens between, over one mesh axis.

    Args:
        model: plain, with the same weights on every rank; called with an `UnpaddedBatch`.
        blocks: its blocks.
        mesh: of one axis.
        plan: the style of every module that has parameters or needs its inputs elsewhere.
        sequence: whether the plan divides tokens: batches are then filled up to a multiple.
    """
    parallelize_module(model, mesh, dict(plan), src_data_rank=None)
    if sequence:
        model.register_forward_pre_hook(lambda _, inputs: _filled(inputs, mesh.size()))
    for module in (*blocks, model):
        module.register_forward_hook(lambda _, inputs, output: _of_its_own(output))


def hidden_layout(sequence: bool) -> Placement:
    """How hidden states lie between the modules of a block."""
    return Shard(_TOKENS) if sequence else Replicate()


def norm_style(sequence: bool) -> ParallelStyle:
    """The style of a norm inside a block."""
    if sequence:
        return SequenceParallel(sequence_dim=_TOKENS, use_local_output=True)
    return Replicated()


def heads_norm_style() -> ParallelStyle:
    """The style of a norm of every head on its own: each rank has some of the heads, shape
    [T, H, D], and the gradient of the weight is the sum over all."""
    return SequenceParallel(sequence_dim=_HEADS, use_local_output=True)


def embedding_style(num_rows: int, size: int) -> ParallelStyle:
    """The style of the table of the vocabulary: divided where `size` ranks get equally many rows,
    else whole on each of them."""
    if num_rows % size:
        return Replicated()
    return DividedEmbedding()


def tied_head_style(num_rows: int, size: int) -> ParallelStyle:
    """The style of a head that gets the table of the vocabulary: divided as that is."""
    return Replicated() if num_rows % size else LogitsInParts()


def head_style(num_rows: int, size: int) -> ParallelStyle:
    """The style of a head with a table of its own, a matrix of that many rows."""
    if num_rows % size:
        return Replicated()
    return ColwiseParallel(output_layouts=Shard(_VOCABULARY), use_local_output=False)


def between(source: Placement, target: Placement) -> ParallelStyle:
    """Moves a module's output from one layout to another."""
    return PrepareModuleOutput(output_layouts=source, desired_output_layouts=target)


class Replicated(ParallelStyle):
    """Computes the same on every rank: parameters whole, inputs and output whole and plain.

    The parameters become DTensors all the same, so that a gradient's norm and an optimizer see one
    kind of them. Where a parameter that comes as an input is divided, so is the computation.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # torch declares that hooks return nothing; what they return is passed on.
        hooks: tuple[Any, Any] = (_all_replicated, _whole)
        return distribute_module(module, device_mesh, _replicate, *hooks)


class LogitsInParts(Replicated):
    """A head with a table of the vocabulary that is divided: so stays the output, logits of
    shape [P, V], each rank's for its part of V. See `logits.py`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hooks: tuple[Any, Any] = (_all_replicated, _in_parts)
        return distribute_module(module, device_mesh, _replicate, *hooks)


class OwnKeys(ParallelStyle):
    """A dropout on the rank's own tokens takes their keys out of all tokens'."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, HiddenDropout):
            raise TypeError(f"expected a HiddenDropout, got {type(module).__name__}")
        rank, size = device_mesh.get_local_rank(), device_mesh.size()

        def own(_: nn.Module, inputs: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
            hidden, keys = inputs
            return hidden, None if keys is None else keys.chunk(size)[rank]

        module.register_forward_pre_hook(own)
        return module


def _filled(inputs: tuple[Any, ...], multiple: int) -> tuple[Any, ...]:
    batch, *others = inputs
    if not isinstance(batch, UnpaddedBatch):
        raise TypeError(f"expected an UnpaddedBatch, got {type(batch).__name__}")
    return batch.filled(multiple), *others


class _Handed(torch.autograd.Function):
    """Its input, uncopied, as a tensor that is no view."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _of_its_own(output: Any) -> Any:
    """DTensors hand out views, and FSDP2 warns of modules that return some."""
    if isinstance(output, tuple):
        return tuple(map(_of_its_own, output))
    is_plain = isinstance(output, Tensor) and not isinstance(output, DTensor)
    return _Handed.apply(output) if is_plain else output  # type: ignore[no-untyped-call]


def _replicate(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = DTensor.from_local(parameter.data, mesh, [Replicate()], run_check=False)
        setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _all_replicated(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    return tuple(
        DTensor.from_local(value, mesh, [Replicate()], run_check=False)
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
        else value
        for value in inputs
    )


def _whole(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.redistribute(mesh, [Replicate()]).to_local()


def _in_parts(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.redistribute(mesh, [Shard(_VOCABULARY)])
