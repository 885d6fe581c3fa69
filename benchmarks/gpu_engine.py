"""The engine on one device, as cases run it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from elastrata.bench.samples import Samples
from elastrata.checkpoints.training_state import training_state
from elastrata.core.control_signal import Action
from elastrata.core.loop import Loop
from elastrata.core.mesh import lone_group
from elastrata.core.optimizer import build_optimizer
from elastrata.core.record import StepRecord
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.engine import DividedModel, divided_model, training_loop
from elastrata_pipelines.batches import Start


@contextmanager
def _threads(recipe: Recipe) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(recipe.workers.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def records(recipe: Recipe, samples: Samples, device: torch.device) -> list[StepRecord]:
    """The engine's own steps on a device."""
    with lone_group(device), _threads(recipe):
        return list(steps_after(*engine(recipe, samples, device), samples, 0))


def engine(
    recipe: Recipe, samples: Samples, device: torch.device
) -> tuple[DividedModel, torch.optim.Optimizer, Loop]:
    endless = recipe.model_copy(update={"steps": 1000, "epochs": None, "tokens": None})
    divided = divided_model(endless, samples.vocabulary, samples.seq_len, device, 1)
    blocks = recipe.workload.blocks(divided.model)
    optimizer = build_optimizer(recipe.optimizer, divided.model, blocks)
    return divided, optimizer, training_loop(endless, divided.clip, samples.vocabulary, device, 1)


def steps_after(
    divided: DividedModel,
    optimizer: torch.optim.Optimizer,
    loop: Loop,
    samples: Samples,
    done: int,
) -> Iterator[StepRecord]:
    """The steps after the first `done` ones."""
    run = loop.run(
        divided.forward_backward, optimizer, samples.steps[done:], Start(), lambda: Action.GO_ON
    )
    return (record for record, _ in run)


def tensors(divided: DividedModel, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every tensor of a training state, this rank's part."""
    state = training_state(divided.model, optimizer)
    for part in sorted(state):
        for name in sorted(state[part]):
            if isinstance(value := state[part][name], Tensor):
                yield getattr(value, "_local_tensor", value).detach()
