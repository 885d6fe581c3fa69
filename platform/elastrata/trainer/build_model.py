"""Construction of a recipe's model on one rank, sharded, and of the loop that trains it.

It does not depend on Ray, so that `elastrata bench` measures the code that workers run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastrata.checkpoints.state import MODEL, training_state
from elastrata.device.capabilities import (
    DeviceCapabilities,
    capabilities,
    current_device,
    substitutions,
)
from elastrata.device.kernels import has_kernels, use_kernels
from elastrata.parallel.activation_checkpointing import (
    RECOMPUTED,
    Recomputation,
    initial_recomputation,
    recompute,
)
from elastrata.parallel.init_weights import DeferredModel, allocate
from elastrata.parallel.mesh import rank_mesh
from elastrata.parallel.parallelize import DTYPES, initial_gradient_sync, parallelize
from elastrata.recipe.recipe import Recipe
from elastrata.sparsity.config import TwoFourConfig
from elastrata.sparsity.layers import layer_shapes, sparse_matrices
from elastrata.sparsity.masks import Masks, SparsePhase
from elastrata.step.average import WeightAverage
from elastrata.step.clip import Clip, build_clip
from elastrata.step.forward_backward import ForwardBackward, WholeModel
from elastrata.step.norms import StageRanks
from elastrata.workload.workload import PipelineParallel, TensorParallel
from elastrata_pipelines.format import Vocabulary


@dataclass(frozen=True)
class DividedModel:
    """This rank's part of a recipe's model, divided over all ranks."""

    model: nn.Module
    """Module whose parameters have their names in the whole model."""
    forward_backward: ForwardBackward
    """Forward and backward pass through the model, with all stages of a pipeline."""
    clip: Clip
    """Clips the gradient; may register hooks on the model."""
    blocks: Sequence[nn.Module]
    """The model's blocks."""
    pipeline: dist.ProcessGroup | None = None
    """The ranks that hold the stages of this pipeline; None without one."""
    compile: bool = False
    """Whether blocks are compiled."""
    draw: Callable[[], None] = lambda: None
    """Initialises this rank's parameters at random, if `build_divided_model` has not."""

    def recompute(self, way: Recomputation) -> None:
        """Set the activation checkpointing of the blocks from now on."""
        for block in self.blocks:
            recompute(block, way, compile=self.compile)
        self.forward_backward.set_recomputation(RECOMPUTED[way])


def build_divided_model(
    recipe: Recipe,
    vocabulary: Vocabulary,
    seq_len: int,
    device: torch.device,
    world_size: int,
    *,
    draws: bool = True,
) -> DividedModel:
    """Build the recipe's model over all ranks of the process group.

    Args:
        recipe: workload, parallelism, precision and clipping.
        vocabulary: of the run's data.
        seq_len: tokens of the longest sample.
        device: of this rank.
        world_size: ranks of the process group.
        draws: whether parameters are initialised at random now.
    """
    recipe = settle(recipe, device)
    divide = _pipelined if recipe.parallel.pipeline > 1 else _sharded
    divided = divide(recipe, vocabulary, seq_len, device, world_size)
    if draws:
        divided.draw()
    return divided


def settle(recipe: Recipe, device: torch.device) -> Recipe:
    """Return the recipe with values for this device in place of `auto` for precision and
    compilation. The driver has chosen them for all workers, if it is one that trains."""
    here = capabilities(device)
    return recipe.on_device(
        is_gpu=device.type == "cuda", has_bf16=here.has_bf16, can_compile=here.can_compile
    )


def _sharded(
    recipe: Recipe, vocabulary: Vocabulary, seq_len: int, device: torch.device, world_size: int
) -> DividedModel:
    workload = recipe.workload
    outline = _outline(recipe, vocabulary, seq_len)
    model = parallelize(
        outline.model,
        workload.blocks(outline.model),
        rank_mesh(device.type, world_size, recipe.parallel.replicate, recipe.parallel.tensor),
        precision=recipe.used_precision,
        activation_checkpointing=initial_recomputation(recipe.activation_checkpointing),
        compile=_compiles(recipe, device),
        parallel=recipe.parallel,
        tensor_parallel=workload.tensor_parallel if isinstance(workload, TensorParallel) else None,
    )
    # The model is on the meta device until here, so no rank ever holds all of it.
    allocate(model, device)
    outline.fill_buffers(model)
    clip = build_clip(
        recipe.clip,
        model,
        # Virtual ranks promise the same bits at any world size, so the norm is summed in a fixed
        # order.
        ordered=recipe.parallel.virtual_ranks is not None,
        # Sparse phases zero gradients, and micro-batches add theirs up, after the backward passes.
        late=recipe.parallel.gradient_sync != "step" or any(p.sparsity for p in recipe.parts),
    )
    sync = initial_gradient_sync(recipe.parallel.gradient_sync)
    forward_backward = WholeModel(model, recipe.workload, sync)
    blocks = recipe.workload.blocks(model)
    # Deferred, because a resumed run overwrites all weights anyway.
    compile, draw = _compiles(recipe, device), partial(outline.draw, model)
    return DividedModel(model, forward_backward, clip, blocks, compile=compile, draw=draw)


def build_masks(recipe: Recipe, divided: DividedModel) -> Masks | None:
    """Return the masks of the recipe's phases over its model, or None if no phase is sparse."""
    phases = [SparsePhase(part.num_steps, part.sparsity) for part in recipe.parts]
    if not any(phase.sparsity for phase in phases):
        return None
    sharded = [module for module in divided.model.modules() if isinstance(module, FSDPModule)]
    matrices = sparse_matrices(divided.model, divided.blocks)
    masks = Masks(
        matrices,
        layer_shapes(recipe.workload),
        phases,
        seed=recipe.seed,
        sharded=sharded,
        pipeline=divided.pipeline,
    )
    # Without kernels the masks still hold weights at zero; products are just not faster.
    if _skips_zeros(recipe) and has_kernels(current_device()):
        use_kernels(divided.model, matrices, masks.uses_kernels)
    return masks


def build_weight_average(recipe: Recipe, model: nn.Module) -> WeightAverage | None:
    """Return the average of this rank's shards, not yet started, or None if the recipe has none."""
    if recipe.average is None:
        return None
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return WeightAverage(recipe.average, training_state(model)[MODEL], sharded)


def probe_capabilities(recipe: Recipe, device: torch.device) -> DeviceCapabilities:
    """Return the device's capabilities. 2:4 kernels are only probed if the recipe uses them."""
    return capabilities(device, tries_kernels=_skips_zeros(recipe))


def missing_features(recipe: Recipe, here: DeviceCapabilities) -> list[str]:
    """Return a line for each feature that the recipe requests and the device lacks, with its
    substitute."""
    dtype = DTYPES[recipe.used_precision]
    compiles = recipe.compile is True
    may_be_selective = compiles and recipe.activation_checkpointing in ("selective", "auto")
    uncompiled = []
    if may_be_selective and here.can_compile and recipe.workload.interrupts_graphs(here, dtype):
        uncompiled = [
            "compile: true: dense attention on a GPU breaks graphs: with "
            "activation_checkpointing selective blocks run uncompiled; full or none "
            "compiles the rest of them"
        ]
    return [
        *uncompiled,
        *substitutions(here, dtype=dtype, compile=compiles, skip_zeros=_skips_zeros(recipe)),
        *recipe.workload.substitutions(here, dtype),
    ]


def _skips_zeros(recipe: Recipe) -> bool:
    """Return whether 2:4 kernels multiply in any phase."""
    sparsities = [part.sparsity for part in recipe.parts]
    return any(isinstance(sparsity, TwoFourConfig) and sparsity.kernels for sparsity in sparsities)


def _pipelined(
    recipe: Recipe, vocabulary: Vocabulary, seq_len: int, device: torch.device, world_size: int
) -> DividedModel:
    # Imported here because it loads torch's compiler, which takes seconds.
    from elastrata.pipeline.microbatches import Pipeline
    from elastrata.pipeline.stages import split_into_stages

    workload, parallel = recipe.workload, recipe.parallel
    assert isinstance(workload, PipelineParallel)
    mesh = rank_mesh(
        device.type, world_size, parallel.replicate, parallel.tensor, parallel.pipeline
    )
    costs = workload.block_costs(vocabulary, seq_len)
    outline = _outline(recipe, vocabulary, seq_len)
    stages = split_into_stages(
        outline.model,
        workload,
        costs,
        mesh,
        precision=recipe.used_precision,
        activation_checkpointing=initial_recomputation(recipe.activation_checkpointing),
        compile=_compiles(recipe, device),
        parallel=parallel,
    )
    for stage in stages.stages.values():
        allocate(stage, device)
    outline.fill_buffers(stages.model)
    forward_backward = Pipeline(
        stages,
        workload,
        mesh,
        parallel,
        dtype=DTYPES[recipe.used_precision],
        device=device,
        recomputed=RECOMPUTED[initial_recomputation(recipe.activation_checkpointing)],
    )
    group = mesh.get_group("pipeline")
    # Parameters shared by stages, such as tied embeddings, count once in the gradient norm.
    counted_elsewhere = stages.shared if mesh.get_local_rank("pipeline") else ()
    ranks = StageRanks(group, counted_elsewhere)
    clip = build_clip(recipe.clip, stages.model, pipeline=ranks)
    return DividedModel(
        stages.model,
        forward_backward,
        clip,
        workload.blocks(stages.model),
        group,
        compile=_compiles(recipe, device),
        draw=partial(outline.draw, stages.model),
    )


def _compiles(recipe: Recipe, device: torch.device) -> bool:
    return recipe.compile is True and capabilities(device).can_compile


def _outline(recipe: Recipe, vocabulary: Vocabulary, seq_len: int) -> DeferredModel:
    def build() -> nn.Module:
        # The model is built once per rank and must be the same on each, so the seed is set here.
        torch.manual_seed(recipe.seed)
        return recipe.workload.build_model(vocabulary, seq_len)

    return DeferredModel(build)
