"""Composer's Trainer, random batches."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch.utils.data import DataLoader

from rival_trainers.task import Meter, Task

# Composer imports torchvision, and that of PyPI fails at this call beside a CPU build of torch.
# Nothing of it is used here.
with patch("torch.library.register_fake", lambda *_, **__: lambda function: function):
    from composer import Callback, Trainer
    from composer.algorithms import GradientClipping
    from composer.models import HuggingFaceModel
    from composer.optim import LinearWithWarmupScheduler


class _Steps(Callback):
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def batch_end(self, *_: Any) -> None:
        self._meter.step_ended()


def train(task: Task) -> None:
    settings = task.settings
    model = task.model()
    Trainer(
        model=HuggingFaceModel(model, task.tokenizer),
        train_dataloader=DataLoader(
            task.samples, settings.batch_size, shuffle=True, collate_fn=task.collate, drop_last=True
        ),
        max_duration=f"{settings.steps}ba",
        optimizers=task.optimizer(model),
        schedulers=LinearWithWarmupScheduler(t_warmup=f"{settings.warmup_steps}ba", alpha_f=0.0),
        algorithms=[GradientClipping("norm", clipping_threshold=settings.max_norm)],
        callbacks=[_Steps(task.meter)],
        device="cpu",
        precision="fp32",
        seed=settings.seed,
        progress_bar=False,
        loggers=[],
    ).fit()


VARIANTS = {"default": train}
