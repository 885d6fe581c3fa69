"""Trainers to compare with, and one process of benchmarks/trainers.py.

    python benchmarks/rival_trainers.py TRAINER VARIANT FOLDER SETTINGS

All have the same samples, model and optimizer. The process prints one JSON object as its last line:
the real tokens of every step, the positions of each of its samples, and when it ended.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

THREADS = "1"

os.environ |= {"OMP_NUM_THREADS": THREADS, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch  # noqa: E402
from data_loaders import Samples  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
)

Variants = Mapping[str, "Callable[[Task], None]"]
"""By name, functions that train on a task to its end and tell its meter about every step."""
Features = dict[str, list[int]]
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What Elastrata's recipe says, for the others."""

    steps: int
    batch_size: int
    """Samples per step."""
    seed: int
    mask_probability: float
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    warmup_steps: int
    """Then linear decay to 0 at `steps`."""
    max_norm: float
    """Of the gradient, clipped as a whole."""


@dataclass
class Meter:
    """What a trainer computed on, and when each step ended."""

    tokens: list[int] = field(default_factory=list)
    """Real tokens of each batch."""
    lengths: list[int] = field(default_factory=list)
    """Positions of each sample of a batch, padding included."""
    seconds: list[float] = field(default_factory=list)
    """On a clock, at the end of each step."""

    def saw(self, attention_mask: torch.Tensor) -> None:
        """A batch was formed; shape [samples, positions]."""
        self.tokens.append(int(attention_mask.sum()))
        self.lengths.append(attention_mask.shape[1])

    def step_ended(self) -> None:
        """An optimizer step is done."""
        self.seconds.append(time.perf_counter())


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, and on what."""

    samples: SampleList
    model_folder: Path
    """What `elastrata export` would write of the untrained model."""
    settings: Settings
    meter: Meter = field(default_factory=Meter)

    @cached_property
    def tokenizer(self) -> Any:
        """The data set's."""
        return AutoTokenizer.from_pretrained(self.model_folder)

    def model(self) -> nn.Module:
        """The untrained model, the same for everybody."""
        return AutoModelForMaskedLM.from_pretrained(
            self.model_folder, attn_implementation="sdpa"
        ).train()

    def collate(self, samples: Sequence[Features]) -> Batch:
        """Pads to the longest sample of the batch, masks, and meters."""
        batch: Batch = self._collator(samples)
        self.meter.saw(batch["attention_mask"])
        return dict(batch)

    @cached_property
    def _collator(self) -> DataCollatorForLanguageModeling:
        return DataCollatorForLanguageModeling(
            self.tokenizer, mlm_probability=self.settings.mask_probability
        )

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """AdamW as Elastrata's recipe has it: fused, biases and norms do not decay."""
        settings, parameters = self.settings, list(model.parameters())
        return torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2]},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )


class SampleList(Dataset[Features]):
    """The samples as the collator wants them."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> Features:
        return {"input_ids": self._samples[number].tolist()}


def _accelerate_loop() -> Variants:
    """Accelerate: a loop written by hand, random batches."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader
    from transformers import get_linear_schedule_with_warmup

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

    return {"by hand": train}


def _composer_trainer() -> Variants:
    """Composer's Trainer, random batches."""
    from torch.utils.data import DataLoader

    # Composer imports torchvision, and that of PyPI fails at this call beside a CPU build of
    # torch. Nothing of it is used here.
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
                task.samples,
                settings.batch_size,
                shuffle=True,
                collate_fn=task.collate,
                drop_last=True,
            ),
            max_duration=f"{settings.steps}ba",
            optimizers=task.optimizer(model),
            schedulers=LinearWithWarmupScheduler(
                t_warmup=f"{settings.warmup_steps}ba", alpha_f=0.0
            ),
            algorithms=[GradientClipping("norm", clipping_threshold=settings.max_norm)],
            callbacks=[_Steps(task.meter)],
            device="cpu",
            precision="fp32",
            seed=settings.seed,
            progress_bar=False,
            loggers=[],
        ).fit()

    return {"default": train}


def _huggingface() -> Variants:
    """Hugging Face Trainer: random batches, and its batches of similar lengths."""
    from torch.utils.data import Sampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    stride = 10
    """Of the batches of similar lengths, every so many-th is trained on: five of the 50 that the
    sampler sorts together, as many as a measurement has."""

    class _Steps(TrainerCallback):
        def __init__(self, meter: Meter) -> None:
            self._meter = meter

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self._meter.step_ended()

    class _Grouped(Trainer):
        """Takes some of the sampler's batches, evenly spread.

        The sampler sorts 50 batches by length, longest first; a measurement of fewer steps would
        see long samples only. So it sees all lengths in their true proportion.
        """

        def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
            sampler = super()._get_train_sampler(train_dataset)
            size, seed = self.args.train_batch_size, self.args.seed
            return _SomeBatches(sampler, size, first=seed % stride)

    class _SomeBatches(Sampler):
        def __init__(self, sampler: Sampler, batch_size: int, first: int) -> None:
            self._sampler, self._batch_size, self._first = sampler, batch_size, first

        def __iter__(self) -> Iterator[int]:
            places = iter(self._sampler)
            number = 0
            while batch := list(islice(places, self._batch_size)):
                if number % stride == self._first:
                    yield from batch
                number += 1

        def __len__(self) -> int:
            return len(self._sampler) // stride

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

    return {
        "default": partial(train, trainer=Trainer),
        "grouped by length": partial(
            train, trainer=_Grouped, train_sampling_strategy="group_by_length"
        ),
    }


TRAINERS: Mapping[str, Callable[[], Variants]] = {
    "accelerate_loop": _accelerate_loop,
    "composer_trainer": _composer_trainer,
    "huggingface": _huggingface,
}


def main() -> None:
    trainer, variant, folder, settings = sys.argv[1:]
    task = Task(
        samples=SampleList(Samples(Path(folder) / "memmap")),
        model_folder=Path(folder) / "model",
        settings=Settings(**json.loads(settings)),
    )
    TRAINERS[trainer]()[variant](task)
    print(json.dumps(asdict(task.meter)), flush=True)


if __name__ == "__main__":
    main()
