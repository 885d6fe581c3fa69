"""Tensor parallelism of models on unpadded batches: the styles that torch does not bring.

Between modules, hidden states are plain tensors: whole on every rank, or, with sequence
parallelism, the rank's own tokens, as many on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    SequenceParallel,
    parallelize_module,
)

from elastrata_workloads.unpadded.batch import UnpaddedBatch
from elastrata_workloads.unpadded.divided_embedding import DividedEmbedding
from elastrata_workloads.unpadded.dropout import HiddenDropout

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
