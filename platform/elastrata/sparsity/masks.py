"""The masks of a run: which weights are held at zero, by phase and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from elastrata.parallel.sharding import local
from elastrata.sparsity import rigl
from elastrata.sparsity.config import AnySparsity, GivenConfig, RiglConfig, TwoFourConfig
from elastrata.sparsity.layers import Shapes, flops_of_zeros, layer_levels, layer_of
from elastrata.sparsity.mask_file import read_masks
from elastrata.sparsity.rigl import (
    all_finite,
    counts_over_shards,
    empty_mask,
    gather_over_stages,
    memory_portions,
    random_masks,
    rows_and_columns,
    zeros_of,
)
from elastrata.step.train_step import StepHooks
from elastrata_pipelines.hashing import key, text_hash

MASKS = "masks"
"""Key of the masks in the state of a run."""


@dataclass(frozen=True)
class SparsePhase:
    """The properties of a phase that determine masks."""

    steps: int
    sparsity: AnySparsity | None


class Masks(StepHooks):
    """The masks of a model in training; every rank has those of its shards.

    After every step, weights that are held at zero are exactly zero. So are their gradients before
    clipping, and the optimizer's running means of them. A weight that is freed starts from zero,
    with running means of zero.

    Args:
        matrices: matrices of the trained model that may be sparse and that this rank has a part of,
            by parameter name.
        shapes: shapes of all layers that may be sparse.
        phases: phases of the run.
        seed: seed of the run.
        sharded: FSDP modules that may keep their matrices gathered after an evaluation.
        pipeline: ranks of the pipeline; None without one.
    """

    def __init__(
        self,
        matrices: Mapping[str, Tensor],
        shapes: Shapes,
        phases: Sequence[SparsePhase],
        *,
        seed: int,
        sharded: Sequence[FSDPModule] = (),
        pipeline: dist.ProcessGroup | None = None,
    ) -> None:
        self._matrices = dict(matrices)
        self._sharded, self._pipeline = list(sharded), pipeline
        self._shapes, self._phases, self._seed = dict(shapes), list(phases), seed
        self._phase_number, self._step_of_phase = -1, 0
        self._masks: dict[str, Tensor] = {}
        self._zeros: dict[str, int] = {}
        self._zeros_in_all = 0
        self._has_changed = False

    @property
    def shards(self) -> dict[str, Tensor]:
        """This rank's shards of the masks by parameter name, true if a weight is held at zero.

        They share memory with the masks.
        """
        return {name: local(mask) for name, mask in self._masks.items()}

    @override
    def changes_before(self, step: int) -> bool:
        """Return whether a phase begins with that step."""
        return self._phase_of(step) != self._phase_number

    @override
    def before_step(self, step: int, optimizer: Optimizer) -> None:
        """Apply the masks of a phase that begins with that step. Collective."""
        before, number = self._sparsity, self._phase_of(step)
        self._step_of_phase = step - sum(phase.steps for phase in self._phases[:number])
        if number == self._phase_number:
            return
        is_first, self._phase_number = self._phase_number < 0, number
        # A phase with the same sparsity as the previous one continues with its masks.
        if is_first or self._sparsity != before:
            for module in self._sharded:
                # An evaluation may have left the earlier weights gathered.
                module.reshard()
            self._replace(self._masks_of(self._sparsity, before), optimizer)

    @override
    @torch.no_grad()
    def before_clip(self, optimizer: Optimizer, *, finite: Tensor) -> None:
        """Update the masks if the step requires it, and zero the gradients of weights at zero.
        Collective.

        Args:
            optimizer: over the matrices.
            finite: whether the step's loss is finite; otherwise masks do not change. Read only in
                steps that update masks.
        """
        # Reading `finite` waits for the device, hence only in steps that need it.
        if self.is_update and finite and all_finite(self._gradients):
            # Algorithm 1 takes no optimizer step together with an update of masks. Here it does:
            # otherwise the samples of such a batch would be counted as seen and teach nothing.
            self._update(optimizer)
        for name, mask in self._masks.items():
            # Before clipping, so that they count in no norm.
            gradient = self._matrices[name].grad
            if gradient is not None:
                local(gradient).masked_fill_(local(mask), 0.0)

    @override
    @torch.no_grad()
    def after_update(self) -> None:
        """Zero all masked weights again."""
        for name, mask in self._masks.items():
            # Their gradient is zero, but the update need not be: Muon's updates are those of whole
            # matrices.
            local(self._matrices[name]).masked_fill_(local(mask), 0.0)

    @property
    def _gradients(self) -> list[Tensor]:
        return [m.grad for m in self._matrices.values() if m.grad is not None]

    @property
    def is_update(self) -> bool:
        """Whether masks change in this step, by gradients."""
        return self._drop_fraction > 0

    def uses_kernels(self, name: str) -> bool:
        """Return whether a matrix has 2:4 zeros that kernels should skip."""
        config = self._sparsity
        return isinstance(config, TwoFourConfig) and config.kernels and name in self._masks

    @override
    def figures(self, tokens: int) -> dict[str, Any]:
        """Return the step's FLOPs of products with zeros, and the sparsity if it has changed.
        Collective."""
        zeros = flops_of_zeros(self._zeros_in_all, tokens, dense_gradient=self.is_update)
        return {"flops_of_zeros": zeros, "layer_sparsity": self._take_changed_sparsity()}

    def _take_changed_sparsity(self) -> dict[str, float]:
        """Return the counted share of exact zeros by layer; empty if masks have not changed.
        Collective."""
        if not self._has_changed:
            return {}
        self._has_changed = False
        names = list(self._masks)
        matrices = [self._matrices[name] for name in names]
        zeros = counts_over_shards([local(matrix) == 0 for matrix in matrices], matrices)
        shares = [count / matrix.numel() for count, matrix in zip(zeros, matrices, strict=True)]
        local_shares = dict(zip(map(layer_of, names), shares, strict=True))
        by_layer = gather_over_stages(local_shares, self._pipeline)
        return {layer: by_layer[layer] for layer in self._shapes if layer in by_layer}

    def state(self) -> dict[str, Any]:
        """Return the masks as part of a checkpoint; empty if they follow from the seed."""
        return {MASKS: dict(self._masks)} if _is_stored(self._sparsity) else {}

    def restore(self, step: int, load: Callable[[dict[str, Any]], None]) -> None:
        """Restore the masks after that step. Collective."""
        self._phase_number = self._phase_of(step)
        config = self._sparsity
        if config is not None and _is_stored(config):
            self._set_masks(
                {name: empty_mask(self._matrices[name]) for name in self._sparse_levels(config)}
            )
            # `load` fills tensors in place, so they must exist with their layout.
            load({MASKS: self._masks})
            self._count()
        else:
            self._set_masks(self._masks_of(config, None))

    @property
    def _sparsity(self) -> AnySparsity | None:
        return self._phases[self._phase_number].sparsity if self._phase_number >= 0 else None

    @property
    def _drop_fraction(self) -> float:
        config = self._sparsity
        if not isinstance(config, RiglConfig):
            return 0.0
        return rigl.drop_fraction(
            config, self._step_of_phase, self._phases[self._phase_number].steps
        )

    def _phase_of(self, step: int) -> int:
        last = 0
        for number, phase in enumerate(self._phases):
            last += phase.steps
            if step <= last:
                return number
        raise ValueError(f"step {step} of {last}")

    def _sparse_levels(self, config: AnySparsity) -> dict[str, float]:
        """Return the levels of this rank's sparse matrices, by parameter name."""
        levels = layer_levels(config, self._shapes)
        layers = {name: layer_of(name) for name in self._matrices}
        return {name: levels[layer] for name, layer in layers.items() if layer in levels}

    def _masks_of(
        self, config: AnySparsity | None, before: AnySparsity | None
    ) -> dict[str, Tensor]:
        """Return this rank's shards of the masks with which a phase begins after another one."""
        if config is None:
            return {}
        levels = self._sparse_levels(config)
        if isinstance(config, GivenConfig):
            return self._from_file(config.masks, levels)
        matrices = {name: self._matrices[name] for name in levels}
        seed = self._seed if config.seed is None else config.seed
        # RigL continues with the masks of the phase before it, adapted to the new level.
        if not isinstance(config, RiglConfig) or before is None:
            return random_masks(config, matrices, levels, seed)
        return {
            name: rigl.adapt_mask(
                matrix,
                self._mask(name),
                key(seed, text_hash(name)),
                zeros_of(matrix, levels[name]),
            )
            for name, matrix in matrices.items()
        }

    def _from_file(self, path: str, sparse: Iterable[str]) -> dict[str, Tensor]:
        whole = read_masks(path, self._shapes)
        shards = {name: empty_mask(self._matrices[name]) for name in sparse}
        for name in shards:
            if layer_of(name) in whole:
                rows, columns = rows_and_columns(self._matrices[name])
                shards[name] = whole[layer_of(name)].to(rows.device)[rows][:, columns]
        return shards

    def _update(self, optimizer: Optimizer) -> None:
        names = [name for name, zeros in self._zeros.items() if zeros]
        matrices = [self._matrices[name] for name in names]
        masks = self.shards
        # In portions, as the selection needs 8 bytes for every weight.
        for portion in memory_portions(matrices):
            some = matrices[portion]
            counts = [
                int(self._drop_fraction * (matrix.numel() - self._zeros[name]))
                for matrix, name in zip(some, names[portion], strict=True)
            ]
            gradients = [matrix.grad for matrix in some if matrix.grad is not None]
            new = rigl.update_masks(
                some, gradients, [masks[name] for name in names[portion]], counts
            )
            masks.update(zip(names[portion], new, strict=True))
        self._replace(masks, optimizer)

    @torch.no_grad()
    def _replace(self, masks: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """Replace the masks.

        Weights that are or were held at zero start from zero, with running means of zero.
        """
        for name in self._masks.keys() | masks.keys():
            matrix = self._matrices[name]
            mask_before = self._mask(name)
            is_zero = mask_before | masks[name] if name in masks else mask_before
            local(matrix).masked_fill_(is_zero, 0.0)
            for value in optimizer.state.get(matrix, {}).values():
                # Running means; the count of steps is a scalar.
                if isinstance(value, Tensor) and value.shape == matrix.shape:
                    local(value).masked_fill_(is_zero, 0.0)
        self._set_masks(masks)

    def _set_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Store this rank's shards of masks, sharded like the matrices."""
        self._masks = {}
        for name, mask in masks.items():
            self._masks[name] = torch.zeros_like(self._matrices[name], dtype=torch.bool)
            local(self._masks[name]).copy_(mask)
        self._count()

    def _count(self) -> None:
        shards = self.shards
        zeros = counts_over_shards(list(shards.values()), [self._matrices[name] for name in shards])
        self._zeros = dict(zip(shards, zeros, strict=True))
        self._zeros_in_all = sum(gather_over_stages(self._zeros, self._pipeline).values())
        self._has_changed = True

    def _mask(self, name: str) -> Tensor:
        """Return this rank's shard of a mask; all false without a mask."""
        mask = self._masks.get(name)
        return empty_mask(self._matrices[name]) if mask is None else local(mask)


def _is_stored(config: AnySparsity | None) -> bool:
    """Return whether checkpoints need the masks, as they do not follow from the recipe alone."""
    # RigL's masks depend on gradients, and a file may change or disappear.
    return isinstance(config, RiglConfig | GivenConfig)
