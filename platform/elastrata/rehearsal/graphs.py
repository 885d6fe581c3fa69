"""What torch.compile makes of a recipe's blocks: dynamo runs, and inductor, which needs a device's
own compiler, does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from torch._dynamo.utils import counters

from elastrata.core.control_signal import Action
from elastrata.core.optimizer import build_optimizer
from elastrata.rehearsal.figures import GraphFigures
from elastrata.rehearsal.rank import DEVICE, Task
from elastrata.rehearsal.samples import rank_steps, shortened, varying
from elastrata.rehearsal.session import rehearsal
from elastrata.trainer import engine
from elastrata_pipelines.batches import Start
from elastrata_pipelines.payload import RankStep

_STEPS = 3


class Counting:
    """A backend of torch.compile that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """One more."""
        self.graphs += 1
        return graph.forward


def rehearse_graphs(task: Task, rank: int) -> GraphFigures:
    """Graphs, breaks and recompilations over some steps whose lengths vary, and those of the first
    one in another group of workers of the same processes, as after a fault."""
    place, lengths = task.data_rank(rank), varying(task.recipe, task.spec, _STEPS)
    # A graph is one of a block, however many micro-batches go through it.
    fewest = max(2, task.recipe.parallel.micro_batch_multiple)
    steps = [
        shortened(step, fewest)
        for step in rank_steps(task.recipe, task.tokens, task.spec, place, lengths)
    ]
    with _counted() as backend, rehearsal(task.device, world_size=task.world_size, rank=rank):
        after = [backend.graphs for _ in _of_new_group(task, place.is_primary, steps)]
        breaks = dict(counters["graph_break"])
        for _ in _of_new_group(task, place.is_primary, steps[:1]):
            pass
    return GraphFigures(
        steps=len(after),
        graphs=after[-1],
        breaks=sum(breaks.values()),
        reasons=[reason.splitlines()[0] for reason in breaks],
        recompilations=after[-1] - after[0],
        next_group=backend.graphs - after[-1],
    )


def _of_new_group(task: Task, is_primary: bool, steps: Sequence[RankStep]) -> Iterator[object]:
    """These steps of a rank, as it takes them in a group of workers of its own."""
    recipe, spec = task.recipe, task.spec
    divided = engine.divided_model(
        recipe, spec.vocabulary, spec.seq_len, DEVICE, task.world_size, draws=False
    )
    blocks = recipe.workload.blocks(divided.model)
    optimizer = build_optimizer(recipe.optimizer, divided.model, blocks)
    masks = engine.phase_masks(recipe, divided)
    loop = engine.training_loop(
        recipe,
        divided.clip,
        spec.vocabulary,
        DEVICE,
        task.world_size,
        is_primary=is_primary,
        masks=masks,
    )
    return loop.run(divided.forward_backward, optimizer, steps, Start(), lambda: Action.GO_ON)


@contextmanager
def _counted() -> Iterator[Counting]:
    """Whatever is compiled goes to a counting backend, wherever it is compiled."""
    backend, compiled = Counting(), torch.compile

    def compile(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **{**kwargs, "backend": backend})

    counters.clear()
    with (
        patch.object(torch, "compile", compile),
        torch._dynamo.config.patch(specialize_float=True),
    ):
        yield backend
