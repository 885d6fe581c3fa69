"""Parallelism, applied to a plain model by one function, in the order of its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from elastrata.config import Config
from elastrata.parallel.activation_checkpointing import Recomputation, recompute
from elastrata.parallel.mesh import data_axes
from elastrata.parallel.reduction import (
    BackgroundAllGather,
    DeterministicReduceScatter,
    DuringBackward,
    Exchange,
    Reduction,
    build_exchange,
    nodes_of_all,
    wait_and_run,
)

Workers = Annotated[int, Field(gt=0, le=100_000)]
Precision = Literal["fp32", "bf16"]
DTYPES: Mapping[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Types in which parameters are applied."""
GradientSync = Literal["step", "micro_batch"]
"""When gradients are summed over ranks: once a step, or after every micro-batch."""
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
Division = Callable[[nn.Module, DeviceMesh, bool], None]
"""Divides a plain model over a mesh of one axis, and its tokens if the flag is true: a
workload's `TensorParallel.tensor_parallel`."""
_KEEPS_PARAMETERS = "_keeps_parameters"
"""Attribute of a model from `parallelize`: parameters are gathered once a step instead of for
every micro-batch."""
_ORDERED_REDUCTIONS = "_in_order"
"""Attribute of such a model: its reductions that add up in the order of virtual ranks."""
_REDUCTION = "_reduction"
"""Attribute of such a model: its own reduction, or None for FSDP2's."""


class ParallelConfig(Config):
    """Distribution of the model over the workers, and their communication."""

    replicate: Workers | Literal["all"] = 1
    """Number of copies of the model (HSDP), each sharded over workers / replicate. 1: FSDP. all: a
    copy per worker, which sends gradients but no parameters. With `tensor`, a group of that many
    workers counts as one."""
    tensor: Workers = 1
    """Workers that compute every sample together, each with its part of every matrix (tensor
    parallelism). They communicate in every block, so they belong on one machine. Must divide the
    model's heads."""
    sequence: bool = False
    """With `tensor`, whether to also divide the tokens between the matrices: less memory for
    activations, messages of the same size."""
    pipeline: Workers = 1
    """Number of workers, or groups of `tensor` workers, that the model's blocks are divided over
    (pipeline parallelism). Each sends a micro-batch's activations to the next. Messages are small;
    workers idle at the start and end of every step (the bubble)."""
    virtual_stages: Annotated[int, Field(gt=0, le=10_000)] = 1
    """With `pipeline`, stages of the model per worker. More stages: a shorter bubble, more
    messages. Needs `schedule: interleaved_1f1b` or `zero_bubble`."""
    stage_speeds: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1e6)], ...] | None, Field(max_length=10_000)
    ] = None
    """With `pipeline`, relative speeds of its workers, such as `[1, 0.5]`: slower ones have fewer
    blocks. Workers are sorted by their GPUs' peak FLOP/s, descending if the first number is at
    least the last, else ascending. Default: equal."""
    schedule: Schedule = "1f1b"
    """With `pipeline`, order of the work. gpipe: all micro-batches forward, then all backward.
    1f1b: alternating, with activations of fewer micro-batches in memory. interleaved_1f1b: the same
    with `virtual_stages`. zero_bubble: gradients of weights fill the bubble."""
    micro_batches: Annotated[int, Field(gt=0, le=2**20)] | None = None
    """With `pipeline`, a worker's part of a step has a multiple of this many micro-batches, as few
    as `micro_batch_tokens` allows. Must be a multiple of `pipeline`, the default. More
    micro-batches shorten the bubble."""
    reshard_after_forward: bool = True
    """Whether to free a block's gathered parameters between its forward and backward pass. false:
    gather them once per step, with memory for one more copy of the model. No effect if each worker
    has a whole copy."""
    gradient_sync: GradientSync | Literal["auto"] = "step"
    """When gradients are summed over workers. step: once; each worker accumulates a whole gradient
    of 4 bytes per parameter (with `tensor`, of its part). micro_batch: after each micro-batch;
    workers accumulate only their shards, but send more. auto: chosen like `micro_batch_tokens`."""
    reduce_dtype: Precision = "fp32"
    """Number format of gradients in messages. bf16: half the bytes, rounded to 8 bits;
    accumulation, clipping and update stay in fp32."""
    prefetch: Annotated[int, Field(gt=0, le=10_000)] | None = None
    """Number of blocks whose parameters are gathered ahead. Default: one, as in FSDP2."""
    overlap_on_cpu: bool = False
    """Whether communication overlaps with computation on CPUs, too. FSDP2 waits for each message
    there, never on GPUs."""
    virtual_ranks: Workers | None = None
    """Number of parts of every global batch. Gradients are added in the order of the parts, one
    reduction each, so losses are equal to the bit at any number of workers (with `tensor`, of
    groups of that many); a multiple of all numbers of workers is balanced best. Needs
    `workers.threads`, because sums in an operator depend on its threads, and AdamW with
    `optimizer.fused: false`. On GPUs kernels that add with atomics differ in the last bits between
    two runs of the same number of workers, too."""

    @property
    def group_size(self) -> int:
        """Number of workers that compute every sample together."""
        return self.tensor * self.pipeline

    @property
    def num_stages(self) -> int:
        """Number of stages that the blocks are divided into."""
        return self.pipeline * self.virtual_stages

    @property
    def micro_batch_multiple(self) -> int:
        """Divisor of every worker's number of micro-batches in a step."""
        return self.micro_batches or self.pipeline


def initial_gradient_sync(policy: GradientSync | Literal["auto"]) -> GradientSync:
    """Return the initial value of `gradient_sync`, used until `auto` chooses one."""
    return "step" if policy == "auto" else policy


def parallelize(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    precision: Precision,
    activation_checkpointing: Recomputation,
    compile: bool,
    parallel: ParallelConfig,
    tensor_parallel: Division | None = None,
) -> nn.Module:
    """Apply tensor parallelism, activation checkpointing, compilation and FSDP2 to a model, in this
    order.

    FSDP2 shards every block, and the rest of the model, over the data axes. Gradients are *summed*
    over ranks, never averaged: the step has already divided by the weight of the global batch. With
    virtual ranks they are summed in the order of these.

    Args:
        model: a plain model, on the meta device or with the same weights on every rank.
        blocks: its repeated blocks.
        mesh: as `rank_mesh` returned it.
        precision: type in which parameters are applied.
        activation_checkpointing: activations that blocks recompute in the backward pass.
        compile: whether to compile blocks.
        parallel: the recipe's section.
        tensor_parallel: the workload's function; required if the mesh has an axis `tensor`.

    Raises:
        ValueError: `tensor_parallel` is missing.
    """
    if "tensor" in (mesh.mesh_dim_names or ()):
        if tensor_parallel is None:
            raise ValueError("a mesh with an axis `tensor`, and nothing that divides the model")
        tensor_parallel(model, mesh["tensor"], parallel.sequence)
    for block in blocks:
        # Checkpointing and compilation replace `forward` and leave FSDP2's hooks outside, so a
        # recomputation gathers nothing.
        recompute(block, activation_checkpointing, compile=compile)
    _shard(model, blocks, data_axes(mesh), precision, parallel)
    return model


def _shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    data_mesh: DeviceMesh,
    precision: Precision,
    parallel: ParallelConfig,
) -> None:
    """Apply FSDP2 over the data axes, with this project's collectives if the recipe needs them."""
    # FSDP2 reduces in fp32: `Reduction` itself converts gradients to bf16 for the messages, and
    # sums them in fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None, reduce_dtype=torch.float32
    )
    overlap = parallel.overlap_on_cpu and data_mesh.device_type == "cpu"
    exchange = _build_exchange(data_mesh, parallel)
    reduction = _build_reduction(data_mesh, parallel.reduce_dtype, overlap, exchange)
    # A `Reduction` sums over copies itself.
    shards = data_mesh["shard"] if reduction else data_mesh
    # A lone shard gathers nothing, but FSDP2 would cast and copy each parameter in every pass: at
    # small micro-batches that is a third of an H200's time (benchmarks/results/gpu.jsonl).
    keeps = not parallel.reshard_after_forward or data_mesh.size(data_mesh.ndim - 1) == 1
    # None is FSDP2's default: it reshards all modules but the outermost.
    reshard = False if keeps else None
    # Blocks first, so that the outermost bucket gets the remaining parameters.
    for module in (*blocks, model):
        fully_shard(module, mesh=shards, mp_policy=policy, reshard_after_forward=reshard)
    setattr(model, _KEEPS_PARAMETERS, keeps)
    in_order: list[DeterministicReduceScatter] = []
    setattr(model, _ORDERED_REDUCTIONS, in_order)
    setattr(model, _REDUCTION, reduction)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # FSDP2 averages by default. Our reductions also require the plain operator SUM.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # A single rank accumulates in the right order anyway.
            if parallel.virtual_ranks and data_mesh.size() > 1:
                in_order.append(DeterministicReduceScatter(exchange))
                module.set_custom_reduce_scatter(in_order[-1])
            elif reduction:
                reduction.attach(module)
            if overlap:
                module.set_custom_all_gather(BackgroundAllGather())
    # Gathering in the background only helps if it begins before the block needs it.
    if parallel.prefetch or overlap:
        _set_prefetch(model, blocks, parallel.prefetch or 1)


def _build_exchange(mesh: DeviceMesh, parallel: ParallelConfig) -> Exchange | None:
    """Return the exchange among the ranks that share a copy of the model. Collective.

    Gradients in bf16 and those of virtual ranks need it. None: use the default group's connections,
    as gloo connects all ranks anyway.
    """
    if mesh.device_type != "cuda":
        return None
    if parallel.reduce_dtype == "fp32" and not parallel.virtual_ranks:
        return None
    group = mesh.get_group("shard") if mesh.ndim > 1 else mesh.get_group()
    return build_exchange(group, nodes_of_all(), "nccl")


def _build_reduction(
    mesh: DeviceMesh, dtype: Precision, overlap: bool, exchange: Exchange | None
) -> Reduction | None:
    """Return the reduction to use, or None if FSDP2's own is sufficient."""
    if dtype == "fp32" and not overlap:
        return None
    on_completion = DuringBackward() if overlap else wait_and_run
    copies = mesh.get_group("replicate") if mesh.ndim > 1 else None
    return Reduction(DTYPES[dtype], on_completion, copies, exchange)


def _set_prefetch(model: nn.Module, blocks: Sequence[nn.Module], ahead: int) -> None:
    """Set which modules gather their parameters in advance."""
    # Both passes begin with the parameters outside of blocks.
    forward: list[FSDPModule] = [m for m in (model, *blocks) if isinstance(m, FSDPModule)]
    backward = [forward[0], *reversed(forward[1:])]
    for number in range(len(forward)):
        following = slice(number + 1, number + 1 + ahead)
        forward[number].set_modules_to_forward_prefetch(forward[following])
        backward[number].set_modules_to_backward_prefetch(backward[following])


def begin_rounds(model: nn.Module, rounds: int) -> None:
    """Set the number of gradient reductions in the next step.

    Args:
        model: as `parallelize` returned it.
        rounds: number of rounds of virtual ranks.
    """
    for reduce_scatter in getattr(model, _ORDERED_REDUCTIONS, ()):
        reduce_scatter.begin(rounds)


def synchronize_gradients(model: nn.Module, wanted: bool, *, is_last: bool | None = None) -> None:
    """Set whether the next backward pass reduces gradients over ranks or accumulates them locally.

    Args:
        model: as `parallelize` returned it.
        wanted: whether to reduce them and accumulate the sums.
        is_last: whether it is the last backward pass of the accumulation. Before it, sums are those
            over the ranks of one copy of the model. Default: `wanted`.
    """
    is_last = wanted if is_last is None else is_last
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
        # Sums over copies of the model are only needed once, of the accumulated shards.
        model.set_requires_all_reduce(wanted and is_last)
        if reduction := getattr(model, _REDUCTION, None):
            reduction.sums_over_copies = is_last
        if getattr(model, _KEEPS_PARAMETERS, False):
            # A model that keeps its parameters does so until the last backward pass.
            model.set_reshard_after_backward(is_last)
