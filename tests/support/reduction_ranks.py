"""What the ranks send each other, and what becomes of it, for the tests of `parallel`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from elastrata.parallel.parallelize import synchronize_gradients
from elastrata.recipe.recipe import Recipe
from elastrata.step.records import StepRecord
from elastrata_pipelines.batches import Start
from support.bare_loop import BareTraining, train_on_ranks
from support.clip_ranks import Case, Clipped, clip_on_ranks
from support.live_bytes import LiveBytes
from support.uneven import VOCABULARY, Arrays, Section, Training

MESSAGES = ("all_gather_single", "reduce_scatter_single", "all_to_all_single", "all_reduce")


def each(
    rank: int, world_size: int, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """`function(rank, world_size, *call)` for each of some calls, in the same processes."""
    return [function(rank, world_size, *call) for call in calls]


def train_each_way(
    rank: int, world_size: int, recipe: Section, ways: Sequence[Section]
) -> list[list[StepRecord]]:
    """The records of a run with each of some sections `parallel`."""
    return [train_on_ranks(rank, world_size, {**recipe, "parallel": way}) for way in ways]


def peaks_each_way(
    rank: int, world_size: int, recipe: Section, ways: Sequence[Section]
) -> tuple[int, list[int]]:
    """Bytes of the model's parameters, whole, and the most there are at once in the second step."""
    peaks = []
    for way in ways:
        training = BareTraining(
            rank, world_size, Recipe.model_validate({**recipe, "parallel": way})
        )
        records = training.records(Start(), 2)
        next(records)
        with LiveBytes() as live:
            next(records)
        peaks.append(live.peak)
    return sum(p.numel() * p.element_size() for p in training.model.parameters()), peaks


def summed_each_way(
    rank: int, world_size: int, ways: Sequence[Section], cases: Sequence[Case]
) -> list[list[Clipped]]:
    """The sums over micro-batches and ranks of the gradients of all cases, each way."""
    return [clip_on_ranks(rank, world_size, way, "fp32", {"method": "none"}, cases) for way in ways]


def messages_each_way(
    rank: int, world_size: int, micro_batches: int, ways: Sequence[Section]
) -> list[dict[str, int]]:
    """How many messages of each kind the passes of the second step take."""
    return [_messages(rank, micro_batches, way) for way in ways]


def _messages(rank: int, micro_batches: int, way: Section) -> dict[str, int]:
    training = Training({"lr": 0.02}, way)
    ids = torch.arange(VOCABULARY)
    found: Counter[str] = Counter()
    for _ in range(2):
        found.clear()
        with ExitStack() as stack:
            for name in MESSAGES:
                stack.enter_context(patch.object(dist, name, _counting(found, name)))
            for place in range(micro_batches):
                is_last = place == micro_batches - 1
                wanted = is_last or way.get("gradient_sync") == "micro_batch"
                synchronize_gradients(training.model, wanted, is_last=is_last)
                training.model(ids).sum().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    return dict(found)


def _counting(found: Counter[str], name: str) -> Any:
    message = getattr(dist, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        found[name] += 1
        return message(*args, **kwargs)

    return counted


def looked_at_between_steps(rank: int, world_size: int, way: Section) -> list[Arrays]:
    """The state after four steps, without and with a forward pass alone amid them."""
    states = []
    for looked in (False, True):
        training = Training({"lr": 0.02}, way)
        training.steps(0, 2)
        if looked:
            with torch.no_grad():
                training.model(torch.arange(VOCABULARY))
        training.steps(2, 4)
        states.append(training.full())
    return states
