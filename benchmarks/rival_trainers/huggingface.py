"""Hugging Face Trainer: random batches, and its batches of similar lengths."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from rival_trainers.task import Meter, Task

STRIDE = 10
"""Of the batches of similar lengths, every so many-th is trained on: five of the 50 that the
sampler sorts together, as many as a measurement has."""


class _Steps(TrainerCallback):
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._meter.step_ended()


class _Grouped(Trainer):
    """Takes some of the sampler's batches, evenly spread.

    The sampler sorts 50 batches by length, longest first; a measurement of fewer steps would see
    long samples only. So it sees all lengths in their true proportion.
    """

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
        sampler = super()._get_train_sampler(train_dataset)
        size, seed = self.args.train_batch_size, self.args.seed
        return _SomeBatches(sampler, size, first=seed % STRIDE)


class _SomeBatches(Sampler):
    def __init__(self, sampler: Sampler, batch_size: int, first: int) -> None:
        self._sampler, self._batch_size, self._first = sampler, batch_size, first

    def __iter__(self) -> Iterator[int]:
        places = iter(self._sampler)
        number = 0
        while batch := list(islice(places, self._batch_size)):
            if number % STRIDE == self._first:
                yield from batch
            number += 1

    def __len__(self) -> int:
        return len(self._sampler) // STRIDE


def train(task: Task, trainer: type[Trainer], **options: Any) -> None:
    settings = task.settings
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch_size,
            learning_rate=settings.lr,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_epsilon=settings.eps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_norm,
            warmup_steps=settings.warmup_steps,
            lr_scheduler_type="linear",
            seed=settings.seed,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        trainer(
            task.model(),
            arguments,
            data_collator=task.collate,
            train_dataset=task.samples,
            callbacks=[_Steps(task.meter)],
        ).train()


VARIANTS = {
    "default": partial(train, trainer=Trainer),
    "grouped by length": partial(
        train, trainer=_Grouped, train_sampling_strategy="group_by_length"
    ),
}
