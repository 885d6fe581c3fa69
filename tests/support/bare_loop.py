"""Trains on some ranks without Ray: the same loop that the workers run."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from elastrata.launch.preflight import training_data
from elastrata.recipe.recipe import Recipe
from elastrata.training.clip import build_clip
from elastrata.training.data_rank import data_rank
from elastrata.training.loop import Loop
from elastrata.training.optimizer import build_optimizer
from elastrata.training.parallel import parallelize, rank_mesh
from elastrata.training.record import StepRecord
from elastrata.training.request import Act
from elastrata_pipelines.batches import Start
from elastrata_pipelines.payload import decode


def train_on_ranks(rank: int, world_size: int, recipe: dict[str, Any]) -> list[StepRecord]:
    """The records of all the recipe's steps, as this rank saw them."""
    return train_recipe(rank, world_size, Recipe.model_validate(recipe))


def train_recipe(rank: int, world_size: int, recipe: Recipe) -> list[StepRecord]:
    batches = training_data(recipe).train
    manifest, workload = batches.manifest, recipe.workload
    data = data_rank(rank, world_size, recipe.parallel.tensor)
    torch.manual_seed(recipe.seed)
    model = workload.build_model(manifest.vocabulary, manifest.seq_len)
    parallelize(
        model,
        workload.blocks(model),
        rank_mesh("cpu", world_size, recipe.parallel.replicate, recipe.parallel.tensor),
        precision=recipe.precision,
        activation_checkpointing=recipe.activation_checkpointing,
        compile=recipe.compile,
        parallel=recipe.parallel,
        tensor_parallel=workload.tensor_parallel,
    )
    loop = Loop(
        workload=workload,
        vocabulary=manifest.vocabulary,
        seed=recipe.seed,
        learning_rate=recipe.learning_rate,
        clip=build_clip(recipe.clip, model, ordered=recipe.parallel.virtual_ranks is not None),
        on_nonfinite=recipe.on_nonfinite,
        device=torch.device("cpu"),
        world_size=world_size,
        counts=data.counts,
    )
    groups = batches.groups(
        Start(),
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        max_tokens=4096,
        warmup=recipe.batch_size_warmup,
    )
    stream = (
        step
        for group in groups
        for payload in islice(batches.payloads(group, data.dp_size), data.rank, data.rank + 1)
        for step in decode(payload, manifest.token_dtype)
    )
    optimizer = build_optimizer(recipe.optimizer, model, workload.blocks(model))
    run = loop.run(model, optimizer, stream, Start(), lambda: Act.GO_ON)
    return [record for record, _ in run]
