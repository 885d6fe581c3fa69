"""Muon (Keller Jordan, kellerjordan.github.io/posts/muon): orthogonal updates for the matrices of
the blocks, AdamW for everything else.

`torch.optim.Muon` is not used. It multiplies a sharded matrix with itself, which costs collectives
for every matrix and product. It also computes in bfloat16 only, so that runs at two world sizes
would diverge. Apart from that, the updates are the same.

Every rank computes a share of the matrices: all ranks send it their parts, and receive their parts
of the results. If two mesh axes divide a matrix, as with FSDP2 and tensor parallelism, the exchange
along one axis is nested in that along the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, overload

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from elastrata.optim.base import (
    OptimizerKeys,
    ParameterGroup,
    adam_directions,
    block_matrices,
    split_by_decay,
    trainable,
)
from elastrata.parallel.parallelize import DTYPES, Precision
from elastrata.parallel.sharding import MeshAxis, local, sharding_axes


@dataclass(frozen=True)
class _Part:
    """This rank's part of a matrix."""

    whole: torch.Size
    """Shape of the whole matrix, [m, n]."""
    axes: tuple[MeshAxis, ...]
    """Axes that divide the matrix, outermost first. The innermost one has divided it first."""
    values: Tensor

    def shape_on(self, rank: int) -> torch.Size:
        """Return the shape of the part on `rank` along the outermost axis."""
        sizes, outermost = list(self.whole), self.axes[0]
        for axis in reversed(self.axes):
            # As `torch.chunk` divides: the last ranks may have less than the others, or nothing.
            most = -(-sizes[axis.dim] // axis.size)
            here = rank if axis is outermost else axis.rank
            sizes[axis.dim] = max(0, min(most, sizes[axis.dim] - here * most))
        return torch.Size(sizes)


def on_whole_matrices(
    parameters: Sequence[Tensor], shards: Sequence[Tensor], function: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Apply `function` to matrices that are sharded like `parameters`.

    Collective over the ranks that share the matrices: two all-to-alls along every mesh axis that
    divides any of them, for any number of matrices. The function sees whole matrices, so its
    results do not depend on the number of ranks.

    Args:
        parameters: shapes [m, n], with the sharding of the matrices; their values are not used.
        shards: this rank's shard, maybe empty, of one matrix per parameter, all of one dtype.
        function: keeps shape and dtype.

    Returns:
        This rank's parts of the results.
    """
    return _on_parts(
        [_Part(p.shape, sharding_axes(p), s) for p, s in zip(parameters, shards, strict=True)],
        function,
    )


def _on_parts(parts: Sequence[_Part], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return this rank's parts of the results.

    The parts along the outermost axis are joined, each matrix on one rank. The ranks of the other
    axes, which have the other parts of the same matrices, do the same. The function recurses until
    no axis is left.
    """
    axes = [part.axes[0] for part in parts if part.axes]
    if not axes:
        return [function(part.values) for part in parts]
    # All ranks must take the axes in the same order, or their collectives would not match.
    axis = min(axes, key=lambda axis: axis.number)
    divided_indices = [i for i, part in enumerate(parts) if part.axes and part.axes[0] == axis]
    others = [i for i in range(len(parts)) if i not in divided_indices]
    # The same on all ranks, as it depends on shapes only.
    owners = assign_longest_first([_cost(parts[i].whole) for i in divided_indices], axis.size)
    indices_by_rank = [
        [i for i, o in zip(divided_indices, owners, strict=True) if o == r]
        for r in range(axis.size)
    ]
    own_parts = [parts[i] for i in indices_by_rank[axis.rank]]

    outgoing = [[parts[i].values for i in indices] for indices in indices_by_rank]
    shapes = [[part.shape_on(r) for part in own_parts] for r in range(axis.size)]
    empty = parts[0].values.new_empty(0)
    received = _exchange(outgoing, shapes, axis.group, empty)
    joined_parts = [
        _Part(part.whole, part.axes[1:], torch.cat(pieces, part.axes[0].dim))
        for part, pieces in zip(own_parts, zip(*received, strict=True), strict=True)
    ]
    # The other axes divide the joined matrices further, or different matrices.
    results = _on_parts([*joined_parts, *(parts[i] for i in others)], function)

    # The first results are those of this rank's matrices; the rest are of `others`.
    by_part = dict(zip(others, results[len(own_parts) :], strict=True))
    columns = zip(*shapes, strict=True)
    pieces = [
        torch.split(result, [shape[part.axes[0].dim] for shape in column], part.axes[0].dim)
        for part, result, column in zip(own_parts, results, columns, strict=False)
    ]
    outgoing_results = [[piece[r] for piece in pieces] for r in range(axis.size)]
    returned_values = _exchange(
        outgoing_results, [[v.shape for v in values] for values in outgoing], axis.group, empty
    )
    for indices, values in zip(indices_by_rank, returned_values, strict=True):
        by_part |= dict(zip(indices, values, strict=True))
    return [by_part[i] for i in range(len(parts))]


def assign_longest_first(costs: Sequence[float], size: int) -> list[int]:
    """Assign pieces of work to ranks: the costliest first, each to the least busy rank (Graham's
    LPT rule)."""
    busy, owners = [0.0] * size, [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        owners[piece] = min(range(size), key=lambda rank: busy[rank])
        busy[owners[piece]] += costs[piece]
    return owners


def _cost(shape: torch.Size) -> float:
    # Proportional to the products of a Newton-Schulz iteration, which multiply the smaller dim's
    # Gram matrix.
    return shape.numel() * min(shape)


def _exchange(
    parts: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[torch.Size]],
    group: dist.ProcessGroup,
    empty: Tensor,
) -> list[list[Tensor]]:
    """Send `parts[r]` to rank r of the group, and return the tensors of `shapes[r]` that rank r
    sent."""
    # `empty`, as a rank may have nothing to send, and `cat` needs a tensor.
    outgoing = torch.cat(
        [empty, *(part.reshape(-1) for rank_items in parts for part in rank_items)]
    )
    sizes = [[shape.numel() for shape in rank_items] for rank_items in shapes]
    incoming = empty.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(
        incoming,
        outgoing,
        [sum(rank_items) for rank_items in sizes],
        [sum(part.numel() for part in rank_items) for rank_items in parts],
        group=group,
    )
    flat = iter(torch.split(incoming, [size for rank_items in sizes for size in rank_items]))
    return [[next(flat).view(shape) for shape in rank_items] for rank_items in shapes]


_MUON_RULE = "Muon"
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Keller Jordan's quintic (kellerjordan.github.io/posts/muon): steep at 0, without convergence
to 1."""
_NUM_ITERATIONS = 5
_EPS = 1e-7


class MuonConfig(OptimizerKeys):
    """Muon for the matrices of the blocks; AdamW, with `betas` and `eps`, for the rest.

    Both have the same `lr` and `weight_decay`: a matrix of m rows and n columns moves by 0.2 *
    sqrt(max(m, n)) * lr, so that its elements move as far as with AdamW (Liu et al., arXiv
    2502.16982, equation 4).
    """

    has_second_moments: ClassVar[bool] = False

    name: Literal["muon"]
    """Muon."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay per step of the running mean of a matrix's gradient."""
    nesterov: bool = True
    """Whether to use Nesterov momentum."""
    newton_schulz: Precision = "fp32"
    """Precision of the orthogonalisation. bf16, as published, is faster on GPUs, but results then
    depend more on the number of workers."""

    def groups(self, model: nn.Module, blocks: Sequence[nn.Module]) -> list[ParameterGroup]:
        """Return three groups: matrices of the blocks; other weights, such as embeddings and
        head; biases and norms."""
        parameters = trainable(model)
        matrices = block_matrices(parameters, blocks)
        rest = {name: p for name, p in parameters.items() if name not in matrices}
        return [
            ParameterGroup(
                name="matrices of the blocks",
                rule=_MUON_RULE,
                weight_decay=self.weight_decay,
                parameters=matrices,
            ),
            *split_by_decay(rest, "AdamW", self.weight_decay),
        ]

    def build(self, groups: Sequence[ParameterGroup]) -> Muon:
        """Build Muon, with AdamW for the groups that have its rule."""
        return Muon(
            [
                {
                    "params": list(group.parameters.values()),
                    "weight_decay": group.weight_decay,
                    "orthogonal": group.rule == _MUON_RULE,
                }
                for group in groups
            ],
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            momentum=self.momentum,
            nesterov=self.nesterov,
            dtype=DTYPES[self.newton_schulz],
        )


class Muon(Optimizer):
    """Muon on plain or sharded parameters, equal up to rounding at any number of ranks."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        nesterov: bool,
        dtype: torch.dtype,
    ) -> None:
        """Initialise from groups: dicts with `params`, `weight_decay` and `orthogonal`, false
        for AdamW."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._momentum, self._nesterov = momentum, nesterov
        self._orthogonalize = partial(orthogonalize, dtype=dtype)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters that have gradients.

        Collective over the ranks that shard them: two all-to-alls along each mesh axis, for all
        matrices.
        """
        if closure is not None:
            raise TypeError("Muon takes no closure")
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if group["orthogonal"]:
                updates = self._matrix_updates(parameters)
            else:
                updates = adam_directions(self, parameters, betas=group["betas"], eps=group["eps"])
            weights = [local(parameter) for parameter in parameters]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
        return None

    def _matrix_updates(self, parameters: list[Tensor]) -> list[Tensor]:
        """Return this rank's parts of the orthogonal updates, scaled to the length of AdamW's
        updates."""
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        means = [local(self._mean(parameter)) for parameter in parameters]
        torch._foreach_lerp_(means, gradients, 1 - self._momentum)
        updates = torch._foreach_lerp(gradients, means, self._momentum) if self._nesterov else means
        whole = on_whole_matrices(parameters, updates, self._orthogonalize)
        torch._foreach_mul_(whole, [0.2 * math.sqrt(max(p.shape)) for p in parameters])
        return whole

    def _mean(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean: Tensor = state["momentum_buffer"]
        return mean


def orthogonalize(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Run five iterations of the quintic X -> a X + b (X X^T) X + c (X X^T)^2 X.

    Args:
        matrix: shape [m, n]. A zero matrix remains zero.
        dtype: precision of the computation.

    Returns:
        Shape [m, n], of the dtype of `matrix`. Singular values are about 0.7 to 1.2, except for
            those that were tiny compared with the largest.
    """
    a, b, c = COEFFICIENTS
    # The Gram matrix of the smaller dim is the cheaper one.
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x.to(dtype)
    # The iteration only converges for singular values of at most about 1; the norm bounds the
    # largest.
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)
