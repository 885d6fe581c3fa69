"""The engine of a recipe on one rank: its model, sharded, and the loop that trains it.

Knows no Ray, so that `elastrata bench` measures what the workers run.
"""

from __future__ import annotations

import torch
from torch import nn

from elastrata.recipe.recipe import Recipe
from elastrata.training.clip import build_clip
from elastrata.training.device import Abilities, abilities
from elastrata.training.loop import Loop
from elastrata.training.parallel import DTYPES, parallelize, rank_mesh
from elastrata.training.sparsity.layers import layer_shapes
from elastrata.training.sparsity.masks import Masks, SparsePhase
from elastrata.training.substitutions import substitutions
from elastrata_pipelines.format import Vocabulary


def sharded_model(
    recipe: Recipe, vocabulary: Vocabulary, seq_len: int, device: torch.device, world_size: int
) -> nn.Module:
    """The recipe's model with its first weights, over all ranks of the process group."""
    torch.manual_seed(recipe.seed)
    with device:
        model = recipe.workload.build_model(vocabulary, seq_len)
    return parallelize(
        model,
        recipe.workload.blocks(model),
        rank_mesh(device.type, world_size, recipe.parallel.replicate, recipe.parallel.tensor),
        precision=recipe.precision,
        activation_checkpointing=recipe.activation_checkpointing,
        compile=recipe.compile and abilities(device).can_compile,
        parallel=recipe.parallel,
        tensor_parallel=recipe.workload.tensor_parallel,
    )


def phase_masks(recipe: Recipe, model: nn.Module) -> Masks | None:
    """The masks of the recipe's phases over `model`, as `sharded_model` returned it; None where no
    phase has any."""
    phases = [SparsePhase(part.steps, part.sparsity) for part in recipe.parts]
    if not any(phase.sparsity for phase in phases):
        return None
    shapes = layer_shapes(recipe.workload)
    return Masks(recipe.workload.matrices(model), shapes, phases, seed=recipe.seed)


def training_loop(
    recipe: Recipe,
    model: nn.Module,
    vocabulary: Vocabulary,
    device: torch.device,
    world_size: int,
    *,
    counts: bool = True,
    masks: Masks | None = None,
) -> Loop:
    """The recipe's loop over `model`, as `sharded_model` returned it; may set hooks on it."""
    return Loop(
        workload=recipe.workload,
        vocabulary=vocabulary,
        seed=recipe.seed,
        learning_rate=recipe.learning_rate,
        clip=build_clip(recipe.clip, model, ordered=recipe.parallel.virtual_ranks is not None),
        on_nonfinite=recipe.on_nonfinite,
        device=device,
        world_size=world_size,
        counts=counts,
        masks=masks,
    )


def missing_here(recipe: Recipe, here: Abilities) -> list[str]:
    """A line for each thing that the recipe asks for and a machine lacks, with what is used."""
    dtype = DTYPES[recipe.precision]
    return [
        *substitutions(here, dtype=dtype, compile=recipe.compile),
        *recipe.workload.substitutions(here, dtype),
    ]
