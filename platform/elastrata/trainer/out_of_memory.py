"""What would fit, where a group of workers ran out of a device's memory. Knows no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from elastrata.core.device import current_device, device_name, memory_of_worker
from elastrata.core.workload import Planned, model_spec
from elastrata.planner.choice import USABLE, Choice, Choices, budgets
from elastrata.planner.group import group_cluster, group_layout, phase_choices, policies
from elastrata.recipe.phase import PhaseKeys
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.phase import Phase

_GIB = 2**30
_DIVIDE = (
    "more workers, or parallel.tensor, divide the model further; `elastrata plan` tells what fits"
)


def what_fits(recipe: Recipe, phases: Sequence[Phase]) -> str:
    """The line for a group whose settings need more memory than this rank's device has: which ones
    would fit by the plan. Not collective: the other ranks wait.

    Args:
        recipe: that is trained.
        phases: of the run.
    """
    device = current_device()
    memory = memory_of_worker(device, 1, recipe.workers.memory_gb)
    name = device_name(device) if device.type == "cuda" else "CPU"
    where = f"out of memory: {name}, {memory / _GIB:.1f} GiB"
    if not isinstance(recipe.workload, Planned):
        return f"{where}: a smaller micro_batch_tokens needs less"
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    pairs = zip(recipe.parts, phases, strict=True)
    needs = [_phase(recipe, part, phase, name, world_size) for part, phase in pairs]
    choices, taken = max(needs, key=lambda need: need[0].bytes(need[1]))
    smaller = choices.smaller_than(taken)
    fitting = [one for one in smaller.all if smaller.bytes(one) <= USABLE * memory]
    tried = f"{where}: {_keys(taken)} does not fit"
    if not fitting:
        return f"{tried}, nor by the plan anything smaller on {world_size} workers; {_DIVIDE}"
    best = smaller.best(lambda choice: choice in fitting)
    return f"{tried}; {_keys(best)} does by the plan ({smaller.bytes(best) / _GIB:.1f} GiB)"


def _phase(
    recipe: Recipe, part: PhaseKeys, phase: Phase, device: str, world_size: int
) -> tuple[Choices, Choice]:
    """All that could be chosen in a phase, and what the recipe says; where it leaves something
    open, the smallest."""
    found = phase.batches
    spec = model_spec(recipe.workload, found.manifest.vocabulary, found.manifest.seq_len)
    given = found.tokens_per_micro_batch
    sizes = sorted({given, *budgets(spec.seq_len, part.batch_size)})
    layout = group_layout(recipe.parallel, world_size)
    cluster = group_cluster(device, world_size, 1)
    one = phase_choices(recipe, part, spec, sizes, layout, cluster)
    every = replace(one, policies=policies(recipe), syncs=("step", "micro_batch"))
    if recipe.is_automatic:
        return every, one.smallest
    way, sync = one.policies[0], one.syncs[0]
    taken = Choice(micro_batch_tokens=given, activation_checkpointing=way, gradient_sync=sync)
    return every, taken


def _keys(choice: Choice) -> str:
    sync = choice.gradient_sync
    return (
        f"micro_batch_tokens={choice.micro_batch_tokens} "
        f"activation_checkpointing={choice.activation_checkpointing}"
        + (f" parallel.gradient_sync={sync}" if sync != "step" else "")
    )
