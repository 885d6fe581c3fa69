"""Accelerate: a loop written by hand, random batches."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from rival_trainers.task import Task


def train(task: Task) -> None:
    settings = task.settings
    set_seed(settings.seed)
    accelerator = Accelerator(cpu=True)
    model = task.model()
    optimizer = task.optimizer(model)
    schedule = get_linear_schedule_with_warmup(optimizer, settings.warmup_steps, settings.steps)
    loader = DataLoader(
        task.samples, settings.batch_size, shuffle=True, collate_fn=task.collate, drop_last=True
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _, batch in zip(range(settings.steps), loader, strict=False):
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), settings.max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        task.meter.step_ended()


VARIANTS = {"by hand": train}
