"""The masks of a run: which weights are held at zero, from phase to phase and step to step."""

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
    drawn,
    in_portions,
    no_mask,
    of_all_stages,
    rows_and_columns,
    zeros_of,
)
from elastrata.step.train_step import StepHooks
from elastrata_pipelines.hashing import key, text_hash

MASKS = "masks"
"""Their place in the state of a run."""


@dataclass(frozen=True)
class SparsePhase:
    """A phase, as far as masks depend on it."""

    steps: int
    sparsity: AnySparsity | None


class Masks(StepHooks):
    """The masks of a model that trains; every rank has those of its shards.

    After every step the weights that are held at zero are exactly zero, and so are their gradients
    before it is clipped, and the optimizer's running means of them. A weight that comes back starts
    from zero, with running means of zero.

    Args:
        matrices: of the model as it is trained, by parameter name; those that may be sparse, and of
            these those that this rank has a part of.
        shapes: of all layers that may be sparse.
        phases: of the run.
        seed: of the run.
        sharded: what may keep its matrices gathered after an evaluation.
        pipeline: the ranks that have the model's stages between them; None: there are no stages.
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
        self._number, self._step_of_phase = -1, 0
        self._masks: dict[str, Tensor] = {}
        self._zeros: dict[str, int] = {}
        self._zeros_in_all = 0
        self._is_news = False

    @property
    def shards(self) -> dict[str, Tensor]:
        """This rank's shards of the masks by parameter name, true where a weight is held at zero.
        They lie where the next change is made."""
        return {name: local(mask) for name, mask in self._masks.items()}

    @override
    def changes_before(self, step: int) -> bool:
        """Whether a phase begins with that step."""
        return self._phase_of(step) != self._number

    @override
    def before_step(self, step: int, optimizer: Optimizer) -> None:
        """Takes up the masks of the phase that begins with that step, if one does. Collective."""
        before, number = self._sparsity, self._phase_of(step)
        self._step_of_phase = step - sum(phase.steps for phase in self._phases[:number])
        if number == self._number:
            return
        is_first, self._number = self._number < 0, number
        if is_first or self._sparsity != before:
            for module in self._sharded:
                module.reshard()  # an evaluation may have left it with the weights before
            self._replace(self._masks_of(self._sparsity, before), optimizer)

    @override
    @torch.no_grad()
    def before_clip(self, optimizer: Optimizer, *, finite: Tensor) -> None:
        """Updates the masks where that is due, and zeroes the gradients of weights at zero, so that
        they count in no norm. Collective.

        Args:
            optimizer: over the matrices.
            finite: whether the step's loss is; else masks stay. Read where they may change.
        """
        if self.is_update and finite and all_finite(self._gradients):
            self._update(optimizer)
        for name, mask in self._masks.items():
            gradient = self._matrices[name].grad
            if gradient is not None:
                local(gradient).masked_fill_(local(mask), 0.0)

    @override
    @torch.no_grad()
    def after_update(self) -> None:
        """Zeroes what the optimizer has made of weights at zero: Muon's matrices are whole."""
        for name, mask in self._masks.items():
            local(self._matrices[name]).masked_fill_(local(mask), 0.0)

    @property
    def _gradients(self) -> list[Tensor]:
        return [m.grad for m in self._matrices.values() if m.grad is not None]

    @property
    def is_update(self) -> bool:
        """Whether the step is one in which masks change by the gradient."""
        return self._fraction > 0

    def is_in_fours(self, name: str) -> bool:
        """Whether two of every four neighbours of that matrix are held at zero, and it is to be
        multiplied by kernels that skip them."""
        config = self._sparsity
        return isinstance(config, TwoFourConfig) and config.kernels and name in self._masks

    @override
    def figures(self, tokens: int) -> dict[str, Any]:
        """The FLOPs of the step that were products with zeros, and what has changed. Collective."""
        zeros = flops_of_zeros(self._zeros_in_all, tokens, dense_gradient=self.is_update)
        return {"flops_of_zeros": zeros, "layer_sparsity": self._news()}

    def _news(self) -> dict[str, float]:
        """By layer the share of weights that are exactly zero, counted; empty where masks have not
        changed since the last call. Collective."""
        if not self._is_news:
            return {}
        self._is_news = False
        names = list(self._masks)
        matrices = [self._matrices[name] for name in names]
        zeros = counts_over_shards([local(matrix) == 0 for matrix in matrices], matrices)
        shares = [count / matrix.numel() for count, matrix in zip(zeros, matrices, strict=True)]
        here = dict(zip(map(layer_of, names), shares, strict=True))
        by_layer = of_all_stages(here, self._pipeline)
        return {layer: by_layer[layer] for layer in self._shapes if layer in by_layer}

    def state(self) -> dict[str, Any]:
        """The part of a checkpoint with the masks; nothing where they follow from the seed."""
        return {MASKS: dict(self._masks)} if _is_stored(self._sparsity) else {}

    def restore(self, step: int, load: Callable[[dict[str, Any]], None]) -> None:
        """Goes on as after that step. Collective."""
        self._number = self._phase_of(step)
        config = self._sparsity
        if config is not None and _is_stored(config):
            self._keep({name: no_mask(self._matrices[name]) for name in self._sparse(config)})
            load({MASKS: self._masks})
            self._count()
        else:
            self._keep(self._masks_of(config, None))

    @property
    def _sparsity(self) -> AnySparsity | None:
        return self._phases[self._number].sparsity if self._number >= 0 else None

    @property
    def _fraction(self) -> float:
        config = self._sparsity
        if not isinstance(config, RiglConfig):
            return 0.0
        return rigl.drop_fraction(config, self._step_of_phase, self._phases[self._number].steps)

    def _phase_of(self, step: int) -> int:
        last = 0
        for number, phase in enumerate(self._phases):
            last += phase.steps
            if step <= last:
                return number
        raise ValueError(f"step {step} of {last}")

    def _sparse(self, config: AnySparsity) -> dict[str, float]:
        """The levels of the sparse matrices that this rank has, by parameter name."""
        levels = layer_levels(config, self._shapes)
        names = {name: layer_of(name) for name in self._matrices}
        return {name: levels[layer] for name, layer in names.items() if layer in levels}

    def _masks_of(
        self, config: AnySparsity | None, before: AnySparsity | None
    ) -> dict[str, Tensor]:
        """The masks, this rank's shards, with which a phase begins after another one."""
        if config is None:
            return {}
        levels = self._sparse(config)
        if isinstance(config, GivenConfig):
            return self._from_file(config.masks, levels)
        matrices = {name: self._matrices[name] for name in levels}
        seed = self._seed if config.seed is None else config.seed
        if not isinstance(config, RiglConfig) or before is None:
            return drawn(config, matrices, levels, seed)
        return {
            name: rigl.adapted(
                matrix,
                self._mask(name),
                key(seed, text_hash(name)),
                zeros_of(matrix, levels[name]),
            )
            for name, matrix in matrices.items()
        }

    def _from_file(self, path: str, sparse: Iterable[str]) -> dict[str, Tensor]:
        whole = read_masks(path, self._shapes)
        shards = {name: no_mask(self._matrices[name]) for name in sparse}
        for name in shards:
            if layer_of(name) in whole:
                rows, columns = rows_and_columns(self._matrices[name])
                shards[name] = whole[layer_of(name)].to(rows.device)[rows][:, columns]
        return shards

    def _update(self, optimizer: Optimizer) -> None:
        names = [name for name, zeros in self._zeros.items() if zeros]
        matrices = [self._matrices[name] for name in names]
        masks = self.shards
        for portion in in_portions(matrices):
            some = matrices[portion]
            counts = [
                int(self._fraction * (matrix.numel() - self._zeros[name]))
                for matrix, name in zip(some, names[portion], strict=True)
            ]
            gradients = [matrix.grad for matrix in some if matrix.grad is not None]
            new = rigl.updated(some, gradients, [masks[name] for name in names[portion]], counts)
            masks.update(zip(names[portion], new, strict=True))
        self._replace(masks, optimizer)

    @torch.no_grad()
    def _replace(self, masks: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """Other masks from here on. What is zero now or was before starts from zero, weight and
        running means alike."""
        for name in self._masks.keys() | masks.keys():
            matrix = self._matrices[name]
            was = self._mask(name)
            zero = was | masks[name] if name in masks else was
            local(matrix).masked_fill_(zero, 0.0)
            for value in optimizer.state.get(matrix, {}).values():
                if isinstance(value, Tensor) and value.shape == matrix.shape:
                    local(value).masked_fill_(zero, 0.0)
        self._keep(masks)

    def _keep(self, masks: Mapping[str, Tensor]) -> None:
        """Holds this rank's shards of masks as they lie beside the matrices."""
        self._masks = {}
        for name, mask in masks.items():
            self._masks[name] = torch.zeros_like(self._matrices[name], dtype=torch.bool)
            local(self._masks[name]).copy_(mask)
        self._count()

    def _count(self) -> None:
        here = self.shards
        zeros = counts_over_shards(list(here.values()), [self._matrices[name] for name in here])
        self._zeros = dict(zip(here, zeros, strict=True))
        self._zeros_in_all = sum(of_all_stages(self._zeros, self._pipeline).values())
        self._is_news = True

    def _mask(self, name: str) -> Tensor:
        """This rank's shard of a mask, also where there is none yet."""
        mask = self._masks.get(name)
        return no_mask(self._matrices[name]) if mask is None else local(mask)


def _is_stored(config: AnySparsity | None) -> bool:
    """Whether masks do not follow from the recipe alone."""
    return isinstance(config, RiglConfig | GivenConfig)
