"""Rehearsal of a recipe on a cluster: the ranks that differ, and the compiled graphs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from elastrata.planner.choice import group_layout, plan_automatic_choice
from elastrata.planner.cluster import Cluster, read_cluster
from elastrata.planner.memory import blocks_of_stages, peak_stage_candidates
from elastrata.planner.plan import build_machine
from elastrata.recipe.data_sets import assume_full_phase, data_spec, resolve_steps
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import PhaseKeys, Recipe
from elastrata.rehearsal.cuda import FakeDevice
from elastrata.rehearsal.ledger import GraphFigures, RankFigures
from elastrata.rehearsal.process import Request
from elastrata.rehearsal.rank import Task, rehearse_graphs, rehearse_rank
from elastrata.workload.workload import PlannableWorkload, model_spec
from elastrata_pipelines.errors import UserError, pluralize


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Figures of a rehearsal. The field names are keys of `elastrata rehearse --json`."""

    recipe: str
    device: str
    devices: int
    layout: str
    micro_batch_tokens: int
    activation_checkpointing: str
    batch_size: int
    seq_len: int
    memory_bytes: float
    """Memory of a device."""
    ranks: Sequence[RankFigures]
    """The first rank. With a pipeline, also that of the last stage, and of stages between them that
    have more blocks than the first."""
    graphs: GraphFigures | None
    """None if the recipe does not compile or the request excludes graphs."""


def rehearse_request(request: Request) -> Rehearsal:
    """Rehearse a request and return its figures.

    Raises:
        UserError: the recipe or cluster is invalid; one line for each reason.
    """
    requested_task = read_task(request)
    recipe, cluster = requested_task.recipe, requested_task.cluster
    numbers, graphs = distinct_ranks(requested_task), request.graphs and recipe.compile is True
    context = multiprocessing.get_context("fork")  # a spawned process would lack fake CUDA
    with ProcessPoolExecutor(len(numbers) + graphs, mp_context=context) as processes:
        rehearsed = [processes.submit(rehearse_rank, requested_task, number) for number in numbers]
        compiled = processes.submit(rehearse_graphs, requested_task, 0) if graphs else None
    return Rehearsal(
        recipe=request.recipe,
        device=cluster.device.name,
        devices=cluster.devices,
        layout=group_layout(recipe.parallel, cluster.devices).division,
        micro_batch_tokens=requested_task.tokens,
        activation_checkpointing=recipe.activation_checkpointing,
        batch_size=recipe.batch_size,
        seq_len=requested_task.spec.seq_len,
        memory_bytes=cluster.device.memory_bytes,
        ranks=[rank.result() for rank in rehearsed],
        graphs=compiled.result() if compiled else None,
    )


def read_task(request: Request) -> Task:
    """Return the task of a request, with a recipe without phases or `auto` keys.

    Raises:
        UserError: the recipe or cluster is invalid; one line for each reason.
    """
    cluster = read_cluster(request.cluster)
    if cluster.device.name == "CPU":
        raise UserError(f"--cluster: {request.cluster}: expected GPUs, which a rehearsal simulates")
    # The recipe's own numbers of workers may not fit the rehearsed cluster.
    workers = [f"workers.min={cluster.devices}", f"workers.max={cluster.devices}"]
    recipe = resolve_steps(load_recipe(request.recipe, [*request.overrides, *workers]))
    recipe = recipe.on_device(is_gpu=True, has_bf16=cluster.device.peak.dtype == "bf16")
    if request.phase >= len(recipe.parts):
        raise UserError(
            f"--phase: {request.phase}: the recipe has {pluralize(len(recipe.parts), 'phase')}, "
            "counted from 0"
        )
    spec = data_spec(recipe)
    part = assume_full_phase(recipe.parts[request.phase], spec.seq_len)
    chosen = _plan_open_keys(recipe, part, cluster)
    return Task(
        recipe=recipe.model_copy(update={**_keys(part), **chosen, "phases": ()}),
        spec=spec,
        cluster=cluster,
        device=FakeDevice(
            name=f"NVIDIA {cluster.device.name}",
            capability=(9, 0) if cluster.device.peak.dtype == "bf16" else (7, 0),
            memory_bytes=int(cluster.device.memory_bytes),
            multiprocessors=cluster.device.multiprocessors,
            per_node=cluster.per_node,
        ),
    )


def _keys(part: PhaseKeys) -> Mapping[str, Any]:
    return {key: getattr(part, key) for key in PhaseKeys.model_fields}


def _plan_open_keys(recipe: Recipe, part: PhaseKeys, cluster: Cluster) -> Mapping[str, Any]:
    """Return the plan's values for the keys that the recipe leaves open."""
    if not recipe.is_automatic:
        return {}
    spec = data_spec(recipe)
    model = model_spec(recipe.workload, spec.vocabulary, spec.seq_len)
    plan = plan_automatic_choice(recipe, part, model, cluster)
    return {
        "micro_batch_tokens": plan.micro_batch_tokens,
        "activation_checkpointing": plan.activation_checkpointing,
        "parallel": recipe.parallel.model_copy(update={"gradient_sync": plan.gradient_sync}),
    }


def distinct_ranks(task: Task) -> list[int]:
    """Return the first rank, and with a pipeline the first one of each stage that may need most
    memory."""
    recipe, spec, devices = task.recipe, task.spec, task.cluster.devices
    stages = recipe.parallel.pipeline
    # Without a plan: the first stage holds most activations, the last one the loss.
    numbers = {0, stages - 1}
    if stages > 1 and isinstance(recipe.workload, PlannableWorkload):
        model = recipe.workload.model_spec(spec.vocabulary, spec.seq_len)
        stack = build_machine(recipe, task.cluster).stack
        numbers = peak_stage_candidates(
            blocks_of_stages(model, stack, group_layout(recipe.parallel, devices))
        )
    return [devices // stages * number for number in sorted(numbers)]
