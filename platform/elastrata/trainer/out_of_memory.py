"""Choices with which a group of workers ran out of a device's memory, and those that would fit.
Knows no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
import torch.distributed as dist

from elastrata.core.device import current_device, device_name, memory_of_worker
from elastrata.core.events import RanOut
from elastrata.core.workload import Planned, model_spec
from elastrata.planner.choice import (
    USABLE,
    Choice,
    Choices,
    budgets,
    group_cluster,
    group_layout,
    phase_choices,
    policies,
)
from elastrata.recipe.phase import PhaseKeys
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.phase import Phase

_ERROR = 1.1
"""A plan errs by less than this factor: what it says is too much for a device's memory by more is
refused."""
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


def refuse_what_never_fits(
    kinds: Sequence[Choices], memory: Sequence[float], names: Sequence[str]
) -> None:
    """Of what can be chosen not even the smallest may need clearly more than there is.

    Args:
        kinds: all that each kind of workers may choose; a single choice is taken as it is.
        memory: of each kind, bytes of the worker that has least.
        names: of each kind; that of an only one is not told.

    Raises:
        UserError: it does: a line for each kind.
    """
    lines = []
    for choices, room, name in zip(kinds, memory, names, strict=True):
        smallest = choices.smallest
        needed = choices.bytes(smallest)
        if len(choices.all) > 1 and needed > _ERROR * room:
            who = f"a worker on {name}" if len(kinds) > 1 else "a worker"
            lines.append(
                f"micro_batch_tokens: 'auto': even with {words(smallest)} {who} is to need "
                f"{needed / _GIB:.2f} GiB, and has {room / _GIB:.2f}; {_DIVIDE}"
            )
    if lines:
        raise UserError(*lines)


def ran_out(choice: Choice, group: str, device: torch.device) -> RanOut:
    """A choice as one that ran out of memory.

    Args:
        choice: the one that was taken.
        group: the kind of the group that took it.
        device: that had too little memory.
    """
    text = f"{device_name(device)}: out of memory with {words(choice)}"
    return RanOut(group=group, choice=asdict(choice), text=text)


def without(choices: Choices, one: RanOut) -> Choices:
    """Those that need less than the one that ran out of memory; all, where it is none of them."""
    taken = next((choice for choice in choices.all if asdict(choice) == one.choice), None)
    return choices.smaller_than(taken) if taken else choices


def words(choice: Choice) -> str:
    """A choice in a sentence."""
    synced = "" if choice.gradient_sync == "step" else f", gradient_sync {choice.gradient_sync}"
    return (
        f"micro_batch_tokens {choice.micro_batch_tokens:,} and activation_checkpointing "
        f"{choice.activation_checkpointing}{synced}"
    )


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
