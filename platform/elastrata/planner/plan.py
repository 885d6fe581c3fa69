"""The plan of a recipe on a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import ValidationError

from elastrata.core.model_spec import ModelSpec
from elastrata.core.workload import model_spec, tensor_problems
from elastrata.planner.block import Machine
from elastrata.planner.cluster import Cluster
from elastrata.planner.devices import DEVICES
from elastrata.planner.hardware import CPU, GPU
from elastrata.planner.layout import Layout
from elastrata.planner.search import SearchResult, search
from elastrata.planner.stack import elastrata
from elastrata.recipe.data_spec import data_spec
from elastrata.recipe.length import full_part
from elastrata.recipe.phase import PhaseKeys
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.rules import cross_field_problems
from elastrata_pipelines.errors import UserError

_TENSOR_SIZES = (1, 2, 4, 8, 16)
_MOST_DEVICES = 65_536


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All layouts that fit, and what they were computed from."""

    model: ModelSpec
    cluster: Cluster
    machine: Machine
    batch_size: int
    steps: int
    prepared: bool
    """Whether the data set is there; else vocabulary and length are those asked for."""
    result: SearchResult


def plan(recipe: Recipe, part: PhaseKeys, cluster: Cluster) -> Plan:
    """Searches the layouts of one phase of a recipe. Samples count as if all were of full length.

    Args:
        recipe: what is to be trained.
        part: one of its phases.
        cluster: that it is to be trained on.

    Raises:
        UserError: the model fits under no layout, with what is missing and what would make it fit;
            or its workload cannot be planned.
    """
    spec = data_spec(recipe)
    part = full_part(part, spec.seq_len)
    model = model_spec(recipe.workload, spec.vocabulary, spec.seq_len)
    machine = machine_of(recipe, cluster)
    if part.batch_size < 1:
        raise UserError("batch_size: 0: expected at least 1")
    result = _search(recipe, part, model, cluster, machine)
    if not result.forecasts:
        raise UserError(*_misfit(recipe, part, model, cluster, machine, result))
    return Plan(
        model=model,
        cluster=cluster,
        machine=machine,
        batch_size=part.batch_size,
        steps=part.num_steps,
        prepared=spec.prepared,
        result=result,
    )


def machine_of(recipe: Recipe, cluster: Cluster) -> Machine:
    """The cluster's device with this engine, in the recipe's precision."""
    is_cpu = cluster.device.name == "CPU"
    stack = elastrata(
        recipe.precision, recipe.parallel.reduce_dtype, averages=recipe.average is not None
    )
    stack = replace(stack, has_second_moments=recipe.optimizer.name != "muon")
    return Machine(cluster.device, CPU if is_cpu else GPU, stack)


def tensor_sizes(recipe: Recipe) -> list[int]:
    """Into how many parts the matrices of a recipe's model can be divided."""
    return [n for n in _TENSOR_SIZES if n == 1 or not tensor_problems(recipe.workload, n)]


def recipe_keys(recipe: Recipe, layout: Layout, seq_len: int) -> dict[str, object]:
    """The recipe's keys, by dotted path, that make it train under a layout, where they differ from
    what it says. What it says is `auto` stays so."""
    copies: object = "all" if layout.shards == 1 and layout.data > 1 else layout.copies
    wanted: dict[str, object] = {
        "workers.min": min(recipe.workers.min, layout.devices),
        "workers.max": layout.devices,
        "micro_batch_tokens": layout.micro_batch * seq_len,
        "activation_checkpointing": layout.checkpointing,
        "parallel.tensor": layout.tensor,
        "parallel.sequence": layout.sequence,
        "parallel.pipeline": layout.pipeline,
        "parallel.virtual_stages": layout.virtual_stages,
        "parallel.stage_speeds": list(layout.stage_speeds) or None,
        "parallel.replicate": copies,
        "parallel.reshard_after_forward": layout.reshard,
        "parallel.gradient_sync": layout.gradient_sync,
    }
    if layout.tensor * layout.pipeline > 1:
        wanted["workers.min"] = layout.tensor * layout.pipeline
    usual = type(recipe.parallel).model_fields["schedule"].default
    wanted["parallel.schedule"] = layout.schedule if layout.pipeline > 1 else usual
    if layout.pipeline != recipe.parallel.pipeline:
        wanted["parallel.micro_batches"] = None  # by the number of stages
    values = recipe.model_dump(mode="json")
    return {
        path: value for path, value in wanted.items() if _value(values, path) not in (value, "auto")
    }


def problems_of(recipe: Recipe, layout: Layout, seq_len: int) -> list[str]:
    """Why this version cannot train the recipe under a layout, a line each; empty if it can."""
    values = recipe.model_dump(mode="json")
    for path, value in recipe_keys(recipe, layout, seq_len).items():
        *sections, key = path.split(".")
        section = values
        for name in sections:
            section = section[name]
        section[key] = value
    try:
        changed = Recipe.model_validate(values)
    except ValidationError as error:
        return [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    return [line for _, line in cross_field_problems(changed)]


def _value(values: object, path: str) -> object:
    for key in path.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _search(
    recipe: Recipe, part: PhaseKeys, model: ModelSpec, cluster: Cluster, machine: Machine
) -> SearchResult:
    return search(
        model,
        cluster,
        machine,
        batch_size=part.batch_size,
        steps=part.num_steps,
        tensor_sizes=tensor_sizes(recipe),
    )


def _misfit(
    recipe: Recipe,
    part: PhaseKeys,
    model: ModelSpec,
    cluster: Cluster,
    machine: Machine,
    result: SearchResult,
) -> list[str]:
    """By how much the model does not fit, and what would make it fit."""
    nearest, device = result.nearest, cluster.device
    if nearest is None:
        return [
            f"--cluster: {cluster.devices} devices: expected at most batch_size "
            f"({part.batch_size}), a sample for each that has its own"
        ]
    line = (
        f"--cluster: {cluster.devices}x{device.name}: the model fits under no layout; nearest is "
        f"{nearest.layout}, which needs {nearest.needed / 2**30:.1f} GiB on a device of "
        f"{device.memory_bytes / 2**30:.1f}: {nearest.missing / 2**30:.1f} GiB too much"
    )
    remedies = [*_more_devices(recipe, part, model, cluster, machine)]
    remedies += _larger_devices(recipe, part, model, cluster, machine)
    if not remedies:
        return [f"{line}; nor does it on {_MOST_DEVICES:,} of them"]
    return [line, f"it would fit on {' or '.join(remedies)}"]


def _more_devices(
    recipe: Recipe, part: PhaseKeys, model: ModelSpec, cluster: Cluster, machine: Machine
) -> list[str]:
    if cluster.device.memory_bytes <= cluster.device.reserved_bytes:
        return []
    devices = 2 * cluster.devices
    while devices <= _MOST_DEVICES:
        per_node = max(cluster.per_node, min(devices, cluster.device.per_node))
        larger = replace(cluster, devices=devices, per_node=per_node)
        if _search(recipe, part, model, larger, machine).forecasts:
            return [f"{devices}x{cluster.device.name}"]
        devices *= 2
    return []


def _larger_devices(
    recipe: Recipe, part: PhaseKeys, model: ModelSpec, cluster: Cluster, machine: Machine
) -> list[str]:
    for device in sorted(DEVICES.values(), key=lambda device: device.memory_bytes):
        if device.memory_bytes > cluster.device.memory_bytes and device.name != "CPU":
            other = replace(cluster, device=device)
            if _search(recipe, part, model, other, replace(machine, device=device)).forecasts:
                return [f"{cluster.devices}x{device.name}"]
    return []
