"""Search over all layouts of a recipe on a cluster, with a forecast for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from pydantic import ValidationError

from elastrata.parallel.activation_checkpointing import Recomputation
from elastrata.parallel.parallelize import GradientSync, Schedule
from elastrata.planner.cluster import Cluster
from elastrata.planner.devices import CPU, DEVICES, GPU
from elastrata.planner.layout import MOST_SAMPLES, Layout
from elastrata.planner.memory import Memory, memory
from elastrata.planner.operations import Machine
from elastrata.planner.stack import engine_stack
from elastrata.planner.step_time import StepTime, step_time
from elastrata.recipe.data_sets import assume_full_phase, data_spec
from elastrata.recipe.recipe import PhaseKeys, Recipe
from elastrata.recipe.rules import cross_field_problems
from elastrata.workload.model_spec import ModelSpec
from elastrata.workload.workload import model_spec, tensor_problems
from elastrata_pipelines.errors import UserError

# Terms of `StepTime` in words.
_TERM_NAMES = {
    "matrices": "smaller or fewer matrices",
    "recomputation": "recomputation of activations",
    "head": "the head's stage",
    "tensor_messages": "tensor-parallel messages",
    "pipeline_messages": "messages between stages",
    "bubble": "the pipeline's bubble",
    "data_messages": "messages with gradients and parameters",
    "update": "the optimizer's update",
    "loading": "reading the data",
}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Expected memory, speed and cost of a layout."""

    layout: Layout
    memory: Memory
    time: StepTime
    tokens_per_second: float
    """Throughput of all devices together."""
    mfu: float
    """Model FLOPs (causal attention halved, recomputation not counted) divided by the peak."""
    hours: float
    cost: float | None
    """None if the cluster has no price."""

    @property
    def bubble(self) -> float:
        """Share of the step that is pipeline bubble."""
        return self.time.bubble / self.time.total

    @property
    def exposed_message_share(self) -> float:
        """Share of the step in which devices wait for messages."""
        return self.time.messages / self.time.total

    def explain_slowdown(self, best: Forecast) -> str:
        """Return the term with the largest loss against the best layout, in words; empty if no term
        is slower."""
        lost = {name: vars(self.time)[name] - vars(best.time)[name] for name in _TERM_NAMES}
        worst = max(lost, key=lambda name: lost[name])
        total = self.time.total / best.time.total - 1
        if lost[worst] <= 0 or total <= 0:
            return ""
        return f"{total:+.1%}: {_TERM_NAMES[worst]} {lost[worst]:+.3g} s"


def forecast(
    model: ModelSpec,
    cluster: Cluster,
    layout: Layout,
    memory: Memory,
    time: StepTime,
    *,
    batch_size: int,
    steps: int,
) -> Forecast:
    """Return the forecast for a run of `steps` steps."""
    seconds = time.total
    hours = steps * seconds / 3600
    price = cluster.price
    return Forecast(
        layout=layout,
        memory=memory,
        time=time,
        tokens_per_second=batch_size * model.seq_len / seconds,
        mfu=model.flops_per_sample
        * batch_size
        / (seconds * layout.devices * cluster.device.peak_flops),
        hours=hours,
        cost=None if price is None else price * hours * cluster.devices,
    )


_MOST_PARTS = 8
"""Largest number of virtual stages on one device of a pipeline."""
_CHECKPOINTING: tuple[Recomputation, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """Layout that comes nearest to fitting."""

    layout: Layout
    needed: float
    """Memory that the layout needs, in bytes."""
    missing: float
    """Bytes by which this exceeds the device's memory."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a layout search."""

    forecasts: tuple[Forecast, ...]
    """Forecasts of the layouts that fit, fastest first; possibly empty."""
    # Larger micro-batches of the same layout are not tried and not counted.
    too_large: int
    """Number of layouts that do not fit."""
    nearest: Misfit | None
    """None if every layout fits."""

    @property
    def families(self) -> tuple[Forecast, ...]:
        """Fastest forecast of each family of layouts."""
        best: dict[tuple[int, ...], Forecast] = {}
        for each in self.forecasts:
            best.setdefault(division_of(each.layout), each)
        return tuple(best.values())


def division_of(layout: Layout) -> tuple[int, ...]:
    """Return the sizes of a layout that determine how devices divide the model."""
    return layout.tensor, layout.pipeline, layout.copies, layout.shards


def search(
    model: ModelSpec,
    cluster: Cluster,
    machine: Machine,
    *,
    batch_size: int,
    steps: int,
    tensor_sizes: Sequence[int],
    pipelines: bool = True,
) -> SearchResult:
    """Return forecasts for every layout that uses all devices.

    Args:
        model: model to train.
        cluster: cluster to train on.
        machine: device of the cluster and training system.
        batch_size: samples of a step.
        steps: steps of the run.
        tensor_sizes: numbers of parts into which the model's matrices can be divided.
        pipelines: whether to consider pipeline stages.
    """
    forecasts, too_large, nearest = list[Forecast](), 0, None
    for shape in _shapes(model, cluster.devices, cluster.per_node, tensor_sizes, pipelines):
        for layout in _micro_batch_sizes(shape, batch_size):
            needed = memory(model, cluster.device, machine.stack, layout, batch_size)
            missing = needed.total - cluster.device.memory_bytes
            if missing > 0:
                too_large += 1
                if nearest is None or missing < nearest.missing:
                    nearest = Misfit(layout=layout, needed=needed.total, missing=missing)
                break  # a larger micro-batch needs more
            time = step_time(model, cluster, machine, layout, batch_size)
            forecasts.append(
                forecast(model, cluster, layout, needed, time, batch_size=batch_size, steps=steps)
            )
    # Of equally fast layouts, the smaller one leaves more memory free.
    forecasts.sort(key=lambda each: (each.time.total, each.memory.total))
    return SearchResult(forecasts=tuple(forecasts), too_large=too_large, nearest=nearest)


def _micro_batch_sizes(shape: Layout, batch_size: int) -> Iterator[Layout]:
    """Yield the layout with micro-batches of 1, 2, 4... samples, as far as each rank has that
    many."""
    # With one micro-batch per step, syncing after each micro-batch equals syncing after the step.
    samples, least = 1, 2 if shape.gradient_sync == "micro_batch" else 1
    while samples <= min(MOST_SAMPLES, -(-batch_size // shape.data)):
        layout = replace(shape, micro_batch=samples)
        if layout.micro_batches(batch_size) >= least:
            yield layout
        samples *= 2


def _shapes(
    model: ModelSpec,
    devices: int,
    per_node: int,
    tensor_sizes: Sequence[int],
    pipelines: bool,
) -> Iterator[Layout]:
    """Yield all layouts with micro-batches of one sample."""
    for tensor in tensor_sizes:
        if devices % tensor or tensor > per_node:
            # Tensor-parallel devices communicate in every block, so they stay inside a node.
            continue
        for stages, parts, schedule in _stages(model.layers, devices // tensor, pipelines):
            data = devices // tensor // stages
            for shards, sequence, checkpointing in product(
                _shard_counts(data, tensor, per_node),
                (False, True) if tensor > 1 else (False,),
                _CHECKPOINTING,
            ):
                if schedule == "zero_bubble" and checkpointing == "selective":
                    # Activations saved by `selective` serve one backward pass, not its two parts.
                    continue
                syncs: tuple[GradientSync, ...] = ("step", "micro_batch")
                for reshard, sync in product(
                    (True, False) if shards > 1 else (False,),
                    syncs if shards > 1 and stages == 1 else ("step",),
                ):
                    yield Layout(
                        tensor=tensor,
                        sequence=sequence,
                        pipeline=stages,
                        virtual_stages=parts,
                        schedule=schedule,
                        shards=shards,
                        copies=data // shards,
                        checkpointing=checkpointing,
                        gradient_sync=sync,
                        reshard=reshard,
                    )


def _stages(layers: int, devices: int, pipelines: bool) -> Iterator[tuple[int, int, Schedule]]:
    """Yield the numbers of stages, of virtual stages on each device, and the schedule."""
    yield 1, 1, "1f1b"
    for stages in _divisors(devices) if pipelines else ():
        if not 1 < stages <= layers:
            continue
        yield stages, 1, "1f1b"
        yield stages, 1, "zero_bubble"
        # Only virtual stages with equally many blocks are considered.
        if layers % stages == 0:
            for parts in _divisors(layers // stages):
                if 1 < parts <= _MOST_PARTS:
                    yield stages, parts, "interleaved_1f1b"


def _shard_counts(data: int, tensor: int, per_node: int) -> list[int]:
    """Return the shard counts to try: 1, the devices of 1, 2, 4... nodes, and all data-parallel
    devices."""
    inside = max(1, per_node // tensor)
    counts = {1, data}
    while inside < data:
        if data % inside == 0:
            counts.add(inside)
        inside *= 2
    return sorted(counts)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


_TENSOR_SIZES = (1, 2, 4, 8, 16)
# Error messages suggest no larger cluster than this.
_MOST_DEVICES = 65_536


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Layouts that fit, and the inputs of the search."""

    model: ModelSpec
    cluster: Cluster
    machine: Machine
    batch_size: int
    steps: int
    prepared: bool
    """True if the data set exists; otherwise vocabulary and length are the requested ones."""
    result: SearchResult


def plan(recipe: Recipe, part: PhaseKeys, cluster: Cluster) -> Plan:
    """Return the layouts of one phase of a recipe. All samples count as full length.

    Args:
        recipe: recipe to train.
        part: phase of the recipe.
        cluster: cluster to train on.

    Raises:
        UserError: the model fits under no layout (with the missing bytes and possible remedies), or
            the workload cannot be planned.
    """
    spec = data_spec(recipe)
    part = assume_full_phase(part, spec.seq_len)
    model = model_spec(recipe.workload, spec.vocabulary, spec.seq_len)
    machine = build_machine(recipe, cluster)
    if part.batch_size < 1:
        raise UserError("batch_size: 0: expected at least 1")
    result = _search(recipe, part, model, cluster, machine)
    if not result.forecasts:
        raise UserError(*_describe_misfit(recipe, part, model, cluster, machine, result))
    return Plan(
        model=model,
        cluster=cluster,
        machine=machine,
        batch_size=part.batch_size,
        steps=part.num_steps,
        prepared=spec.prepared,
        result=result,
    )


def build_machine(recipe: Recipe, cluster: Cluster) -> Machine:
    """Return the cluster's device with this engine as the training system, in the recipe's
    precision."""
    is_cpu = cluster.device.name == "CPU"
    recipe = recipe.on_device(is_gpu=not is_cpu, has_bf16=cluster.device.peak.dtype == "bf16")
    stack = engine_stack(
        recipe.used_precision, recipe.parallel.reduce_dtype, averages=recipe.average is not None
    )
    stack = replace(stack, has_second_moments=recipe.optimizer.has_second_moments)
    return Machine(cluster.device, CPU if is_cpu else GPU, stack)


def tensor_sizes(recipe: Recipe) -> list[int]:
    """Return the numbers of parts into which the matrices of a recipe's model can be divided."""
    return [n for n in _TENSOR_SIZES if n == 1 or not tensor_problems(recipe.workload, n)]


def recipe_keys(recipe: Recipe, layout: Layout, seq_len: int) -> dict[str, object]:
    """Return the changes to a recipe, by dotted path, with which it trains under a layout.

    Keys with the value `auto` are left unchanged.
    """
    # "all" keeps every copy unsharded when the number of workers changes.
    copies: object = "all" if layout.shards == 1 and layout.data > 1 else layout.copies
    new_values: dict[str, object] = {
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
        new_values["workers.min"] = layout.tensor * layout.pipeline
    # The key has no effect if each worker has a whole copy, but zero bubble demands `false`.
    if layout.shards == 1 and layout.schedule != "zero_bubble":
        del new_values["parallel.reshard_after_forward"]
    # Without a pipeline the schedule has no effect, so the recipe keeps the default.
    default_schedule = type(recipe.parallel).model_fields["schedule"].default
    new_values["parallel.schedule"] = layout.schedule if layout.pipeline > 1 else default_schedule
    if layout.pipeline != recipe.parallel.pipeline:
        # None derives it from the new number of stages.
        new_values["parallel.micro_batches"] = None
    values = recipe.model_dump(mode="json")
    return {
        path: value
        for path, value in new_values.items()
        if _value(values, path) not in (value, "auto")
    }


def layout_problems(recipe: Recipe, layout: Layout, seq_len: int) -> list[str]:
    """Return the reasons why this version cannot train the recipe under a layout, one line each."""
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


def _describe_misfit(
    recipe: Recipe,
    part: PhaseKeys,
    model: ModelSpec,
    cluster: Cluster,
    machine: Machine,
    result: SearchResult,
) -> list[str]:
    """Return the lines of an error: by how much the model does not fit, and what would make it
    fit."""
    nearest, device = result.nearest, cluster.device
    if nearest is None:
        return [
            f"--cluster: {cluster.devices} devices: expected at most batch_size "
            f"({part.batch_size}), one sample per data-parallel device"
        ]
    line = (
        f"--cluster: {cluster.devices}x{device.name}: no layout fits; the nearest is "
        f"{nearest.layout}, which needs {nearest.needed / 2**30:.1f} GiB on a device of "
        f"{device.memory_bytes / 2**30:.1f}: {nearest.missing / 2**30:.1f} GiB too much"
    )
    remedies = [*_find_sufficient_devices(recipe, part, model, cluster, machine)]
    remedies += _find_larger_device(recipe, part, model, cluster, machine)
    if not remedies:
        return [f"{line}; nor would it fit on {_MOST_DEVICES:,} of them"]
    return [line, f"it would fit on {' or '.join(remedies)}"]


def _find_sufficient_devices(
    recipe: Recipe, part: PhaseKeys, model: ModelSpec, cluster: Cluster, machine: Machine
) -> list[str]:
    """Return the smallest power-of-two multiple of the cluster on which the model fits, as a list
    with at most one name."""
    # No number of devices helps if the driver alone fills each of them.
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


def _find_larger_device(
    recipe: Recipe, part: PhaseKeys, model: ModelSpec, cluster: Cluster, machine: Machine
) -> list[str]:
    """Return the cluster with the smallest larger device on which the model fits, as a list with at
    most one name."""
    for device in sorted(DEVICES.values(), key=lambda device: device.memory_bytes):
        if device.memory_bytes > cluster.device.memory_bytes and device.name != "CPU":
            other = replace(cluster, device=device)
            if _search(recipe, part, model, other, replace(machine, device=device)).forecasts:
                return [f"{cluster.devices}x{device.name}"]
    return []
