"""Gradients of any size one likes, clipped on ranks; and the same clipping without any ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastrata.parallel.mesh import rank_mesh
from elastrata.parallel.parallelize import ParallelConfig, parallelize, synchronize_gradients
from elastrata.step.bucket_clip import bucket_limits
from elastrata.step.clip import Clip, ClipConfig, build_clip

SHAPES = ((5, 3), (7, 4), (11,))
"""Of the weights of the root bucket and of two blocks; 2, 3 and 4 ranks divide none of them."""
Buckets = list[np.ndarray]
"""Per bucket, fp32."""


@dataclass(frozen=True)
class Case:
    """One step: what every rank's micro-batches add to the gradient, and the ranks' shares."""

    parts: Sequence[Sequence[Buckets]]
    """By rank, then micro-batch. Every number fits into bfloat16."""
    shares: Sequence[float]


@dataclass(frozen=True)
class Clipped:
    """What the optimizer would see."""

    buckets: Buckets
    norm: float
    """As the clip reports it."""


class _Block(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, carried: Tensor, gradient: Tensor) -> Tensor:
        return carried + (self.weight * gradient).sum()


class _Tower(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPES[0]))
        self.blocks = nn.ModuleList([_Block(shape) for shape in SHAPES[1:]])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        carried = (self.weight * gradients[0]).sum()
        for block, gradient in zip(self.blocks, gradients[1:], strict=True):
            carried = block(carried, gradient)
        return carried


def random_case(seed: int, num_ranks: int, micro_batches: int = 2) -> Case:
    """Wild scales: buckets differ by up to 1e24, ranks by 1e4; with several ranks one is empty."""
    rng = np.random.default_rng(seed)
    scales = [10.0 ** rng.uniform(-12, 12) for _ in SHAPES]
    shares = rng.uniform(0.1, 1, num_ranks)
    if num_ranks > 1:
        shares[rng.integers(num_ranks)] = 0
    parts = [
        [
            [
                _bfloat16(rng.normal(size=shape) * scale * 10.0 ** rng.uniform(-2, 2) * (share > 0))
                for shape, scale in zip(SHAPES, scales, strict=True)
            ]
            for _ in range(micro_batches)
        ]
        for share in shares
    ]
    return Case(parts, (shares / shares.sum()).tolist())


def clip_on_ranks(
    rank: int,
    world_size: int,
    parallel: dict[str, Any],
    precision: Any,
    clip: dict[str, Any],
    cases: Sequence[Case],
    sparse: bool = False,
) -> list[Clipped]:
    """What is left of the gradient of each case, the same on every rank; with `sparse`, clipped as
    where weights are held at zero."""
    model, layout = _Tower(), ParallelConfig.model_validate(parallel)
    mesh = rank_mesh("cpu", world_size, layout.replicate)
    parallelize(
        model,
        list(model.blocks),
        mesh,
        precision=precision,
        activation_checkpointing="none",
        compile=False,
        parallel=layout,
    )
    config = ClipConfig.model_validate(clip)
    return list(_clipped(model, build_clip(config, model, late=sparse), rank, cases))


def _clipped(model: nn.Module, clip: Clip, rank: int, cases: Sequence[Case]) -> Iterator[Clipped]:
    for case in cases:
        clip.before_backward(case.shares[rank])
        for place, buckets in enumerate(case.parts[rank]):
            synchronize_gradients(model, place == len(case.parts[rank]) - 1)
            model([torch.from_numpy(bucket) for bucket in buckets]).backward()
        norm = float(clip.after_backward())
        gradients = [p.grad for p in model.parameters() if isinstance(p.grad, DTensor)]
        yield Clipped([g.full_tensor().numpy() for g in gradients], norm)
        model.zero_grad()


def clip_plainly(clip: dict[str, Any], case: Case) -> Clipped:
    """The same in float64, in one process, written down from the definition."""
    config = ClipConfig.model_validate(clip)
    limits = bucket_limits([int(np.prod(shape)) for shape in SHAPES], config.max_norm)
    locals_ = [
        [sum(buckets[k].astype(float) for buckets in rank) for k in range(len(SHAPES))]
        for rank in case.parts
    ]
    if config.scope == "local":
        locals_ = [
            [_within(part, limit * share) for part, limit in zip(rank, limits, strict=True)]
            for rank, share in zip(locals_, case.shares, strict=True)
        ]
    sums: Buckets = [sum(rank[k] for rank in locals_) for k in range(len(SHAPES))]
    clipped = [_within(part, limit) for part, limit in zip(sums, limits, strict=True)]
    return Clipped(clipped, whole_norm(sums))


def whole_norm(buckets: Buckets) -> float:
    """The 2-norm of all buckets together."""
    return float(np.sqrt(sum(np.square(bucket.astype(float)).sum() for bucket in buckets)))


def _within(values: np.ndarray, limit: float) -> np.ndarray:
    norm = whole_norm([values])
    return values * (limit / norm) if norm > limit else values


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().float().numpy()
