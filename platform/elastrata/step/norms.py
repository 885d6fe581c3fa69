"""2-norms of gradients over all ranks that have parts of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from elastrata.parallel.fsdp_internals import bucket_parameters
from elastrata.parallel.sharding import local

_SQUARES_PER_ROW = 4096
"""Number of squares that are summed in fp32 at a time."""
_SMALLEST_FP32_NORM = 1e-12
"""Squares of smaller values may underflow in fp32."""
_EXACT_BITS = 52
_NUM_FOLDS = 3

Measure = Callable[[Sequence[Tensor]], Tensor]
"""Computes the 2-norm of all gradients together. Collective; all ranks return the same value."""


@dataclass(frozen=True)
class StageRanks:
    """The ranks of a pipeline, which together have all stages of a model."""

    group: dist.ProcessGroup
    counted_elsewhere: Collection[str] = ()
    """Names of parameters whose gradient another of these ranks also has, and counts."""


class ModelNorm:
    """The norm of a model's gradient, an fp32 or float64 scalar.

    Collective; all ranks return the same value.
    """

    def __init__(
        self, model: nn.Module, measure: Measure, pipeline: StageRanks | None = None
    ) -> None:
        elsewhere = pipeline.counted_elsewhere if pipeline else ()
        self._counted = [p for name, p in model.named_parameters() if name not in elsewhere]
        self._measure, self._pipeline = measure, pipeline

    def __call__(self) -> Tensor:
        """Return the norm of the parameters' current gradients."""
        norm = self._measure([p.grad for p in self._counted if p.grad is not None])
        if self._pipeline is None:
            return norm
        square = norm.double() ** 2
        dist.all_reduce(square, group=self._pipeline.group)
        return square.sqrt().float()


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together, an fp32 scalar.

    Collective over the mesh that shards them; all ranks return the same value.
    """
    if not gradients:
        return torch.zeros(())
    if gradients[0].device.type != "cpu":
        return _norm_on_device(gradients)
    # A CPU needs the sums of `tensor_norm`, as PyTorch's lose accuracy.
    return gradient_norms([gradients])[0].float()


def _norm_on_device(gradients: Sequence[Tensor]) -> Tensor:
    # DTensor would reduce a norm over one axis after the other, and warn of that.
    shards: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for gradient in gradients:
        shards.setdefault(_groups(gradient), []).append(local(gradient))
    squares = {
        groups: torch.nn.utils.get_total_norm(parts, foreach=True).square()
        for groups, parts in shards.items()
    }
    # The innermost axis first, whose sum joins those that are sharded over the outer axes only: one
    # message for each axis.
    while groups := max(squares, key=len):
        square = squares.pop(groups)
        dist.all_reduce(square, group=groups[-1])
        squares[groups[:-1]] = squares.get(groups[:-1], 0) + square
    return squares[()].sqrt()


def gradient_norms(buckets: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the norm of each bucket of gradients, float64, shape [buckets].

    Collective over the mesh that shards them, one message for each axis; all ranks return the same
    values.
    """
    squares: dict[tuple[dist.ProcessGroup, ...], list[list[Tensor]]] = {}
    for number, bucket in enumerate(buckets):
        for gradient in bucket:
            by_bucket = squares.setdefault(_groups(gradient), [[] for _ in buckets])
            by_bucket[number].append(tensor_norm(local(gradient)).square())
    device = next((gradient.device for bucket in buckets for gradient in bucket), None)
    totals = torch.zeros(len(buckets), dtype=torch.float64, device=device)
    for groups, by_bucket in squares.items():
        square = torch.stack([_total(values, device) for values in by_bucket])
        for group in groups:
            dist.all_reduce(square, group=group)
        totals += square
    return totals.sqrt()


def tensor_norm(values: Tensor) -> Tensor:
    """Return the norm of one tensor, a float64 scalar; not finite only if an element is not."""
    # A CPU adds up one square after the other: in fp32, the norm of 33 million elements came out
    # 0.15% too small. Summing rows in fp32 and the rest in float64 is 23 times as fast as float64
    # throughout. Squares of very large and very small elements do not fit into fp32; for these the
    # norm is computed again in float64.
    if values.device.type == "cpu":
        flat = values.flatten()
        whole = flat[: len(flat) // _SQUARES_PER_ROW * _SQUARES_PER_ROW].view(-1, _SQUARES_PER_ROW)
        rest = torch.linalg.vector_norm(flat[whole.numel() :])
        rows = torch.cat([torch.linalg.vector_norm(whole, dim=1), rest[None]])
        if _SMALLEST_FP32_NORM < (norm := _in_float64(rows)) < math.inf:
            return norm
    return _in_float64(values)


def reproducible_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all tensors together, a float64 scalar on their device.

    The result is equal to the bit for every order of addition and every number of ranks.

    Squares of float32 values are exact in float64. They are rounded to multiples of a unit that is
    large enough for no sum to need more bits than float64 has. Then no addition rounds, and the
    order does not matter. The remainders of this rounding are treated the same way twice more
    (Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", ARITH 2013). The relative
    error is below 1e-9 for a billion elements of any distribution, and below 1e-12 for a hundred
    million.

    Collective over all ranks if a tensor is sharded. It does not synchronise with the device.
    """
    shards = [local(tensor) for tensor in tensors]
    is_sharded = any(isinstance(t, DTensor) for t in tensors)
    device = shards[0].device
    largest = torch.stack([t.abs().max() if t.numel() else t.new_zeros(()) for t in shards]).max()
    if is_sharded:
        # All ranks must round to multiples of the same units.
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    exponent = torch.frexp(largest.double().square()).exponent.long()
    count = sum(t.numel() for t in tensors)
    # The bits by which a sum of `count` values may exceed the largest one.
    spread = math.ceil(math.log2(count)) + 1
    units = [exponent - fold * (_EXACT_BITS - spread) for fold in range(1, _NUM_FOLDS + 1)]
    sums = torch.zeros(_NUM_FOLDS, dtype=torch.float64, device=device)
    for tensor, shard in zip(tensors, shards, strict=True):
        # Replicas have the same shard, which must count once.
        if _is_first_copy(tensor):
            sums += _multiples(shard, units)
    if is_sharded:
        dist.all_reduce(sums)
    return torch.dot(sums, torch.stack([_power_of_two(unit) for unit in units])).sqrt()


class BucketNorm:
    """The norm of a bucket's flat gradient over some ranks, a float64 scalar.

    Collective over `groups`.
    """

    def __init__(self, module: FSDPModule, groups: Sequence[dist.ProcessGroup]) -> None:
        # With tensor parallelism, the ranks of a group have parts of some tensors and equal copies
        # of others. Each rank adds its share of the squares of a copy.
        runs = groupby(_sizes_and_shares(module), itemgetter(1))
        self._runs = [(sum(size for size, _ in run), share) for share, run in runs]
        self._groups = groups

    def __call__(self, gradient: Tensor) -> Tensor:
        """Return the norm of one or more consecutive shards of the bucket.

        Args:
            gradient: shape [number of shards * shard].
        """
        sizes = [size for size, _ in self._runs]
        runs = torch.split(gradient.view(-1, sum(sizes)), sizes, dim=1)
        squares = [
            tensor_norm(run).square() * share
            for run, (_, share) in zip(runs, self._runs, strict=True)
        ]
        square = torch.stack(squares).sum()
        for group in self._groups:
            dist.all_reduce(square, group=group)
        return square.sqrt()


def _total(squares: Sequence[Tensor], device: torch.device | None) -> Tensor:
    if not squares:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(list(squares)).sum()


def _in_float64(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm


def _groups(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of ranks that have the other shards, one for each mesh axis that shards."""
    if not isinstance(gradient, DTensor):
        return ()
    return tuple(
        gradient.device_mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        if not isinstance(placement, Replicate) and gradient.device_mesh.size(axis) > 1
    )


def _is_first_copy(tensor: Tensor) -> bool:
    """Return whether this rank is the first of those with the same shard."""
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    return all(
        mesh.get_local_rank(axis) == 0
        for axis, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )


def _multiples(tensor: Tensor, units: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares as a multiple of 2^unit for every unit, shape [units].

    All of them are whole numbers. Each unit takes the remainder of the previous one.
    """
    rest = tensor.double().square()
    counts = []
    for unit in units:
        multiples = torch.round(rest * _power_of_two(-unit))
        rest = rest - multiples * _power_of_two(unit)
        counts.append(multiples.sum())
    return torch.stack(counts)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float64, exactly, on every device.

    Args:
        exponent: int64; clamped to the exponents of normal float64 numbers.
    """
    # Assembled from its bits: `exp2` may round, and the host need not read the exponent.
    return ((exponent.clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


def _sizes_and_shares(module: FSDPModule) -> Iterator[tuple[int, float]]:
    """Yield the size of a shard, with padding, and this rank's share in the norm, for every
    tensor of the bucket in order."""
    for padded_size, parameter in bucket_parameters(module):
        yield padded_size, _share(parameter)


def _share(parameter: Tensor) -> float:
    if not isinstance(parameter, DTensor):
        return 1.0
    mesh = parameter.device_mesh
    if "tensor" not in (names := mesh.mesh_dim_names or ()):
        return 1.0
    axis = names.index("tensor")
    return 1 / mesh.size(axis) if parameter.placements[axis].is_replicate() else 1.0
