"""Trainers to compare with, and one process of benchmarks/trainers.py.

    python benchmarks/rival_trainers.py TRAINER VARIANT FOLDER SETTINGS

All trainers have the same samples, model and optimizer. The process prints one JSON object as its
last line: the real tokens of every step, the positions of each of its samples, and its end time.
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

# Before the imports of torch and transformers, which read these variables then.
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
"""Functions, by name, that train a task to its end and report every step to its meter."""
Features = dict[str, list[int]]
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The values of Elastrata's recipe, for the other trainers."""

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
    """Steps of warm-up, followed by linear decay to 0 at `steps`."""
    max_norm: float
    """Maximum norm of the whole gradient, for clipping."""


@dataclass
class Meter:
    """Records the tokens of each batch and the end of each step."""

    tokens: list[int] = field(default_factory=list)
    """Real tokens of each batch."""
    lengths: list[int] = field(default_factory=list)
    """Positions of each sample of a batch, padding included."""
    seconds: list[float] = field(default_factory=list)
    """Clock time at the end of each step."""

    def saw(self, attention_mask: torch.Tensor) -> None:
        """Record a batch; the mask has shape [samples, positions]."""
        self.tokens.append(int(attention_mask.sum()))
        self.lengths.append(attention_mask.shape[1])

    def step_ended(self) -> None:
        """Record the end of an optimizer step."""
        self.seconds.append(time.perf_counter())


@dataclass(frozen=True, kw_only=True)
class Task:
    """The model to train, its samples and settings."""

    samples: SampleList
    model_folder: Path
    """Export of the untrained model, in the format of `elastrata export`."""
    settings: Settings
    meter: Meter = field(default_factory=Meter)

    @cached_property
    def tokenizer(self) -> Any:
        """The data set's tokenizer."""
        return AutoTokenizer.from_pretrained(self.model_folder)

    def model(self) -> nn.Module:
        """Return the untrained model, the same for all trainers."""
        # `from_pretrained` returns a model in evaluation mode, hence `.train()`.
        return AutoModelForMaskedLM.from_pretrained(
            self.model_folder, attn_implementation="sdpa"
        ).train()

    def collate(self, samples: Sequence[Features]) -> Batch:
        """Pad to the longest sample of the batch, mask tokens, and record the batch."""
        batch: Batch = self._collator(samples)
        self.meter.saw(batch["attention_mask"])
        return dict(batch)

    @cached_property
    def _collator(self) -> DataCollatorForLanguageModeling:
        return DataCollatorForLanguageModeling(
            self.tokenizer, mlm_probability=self.settings.mask_probability
        )

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """Return AdamW as in Elastrata's recipe: fused, without decay of biases and norms."""
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
    """The samples in the form that the collator accepts."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> Features:
        return {"input_ids": self._samples[number].tolist()}


def _accelerate_loop() -> Variants:
    """Accelerate: a hand-written loop with random batches."""
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
        # `range` comes first, so that no batch is collated after the last step.
        for _, batch in zip(range(settings.steps), loader, strict=False):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), settings.max_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            task.meter.step_ended()

    return {"by hand": train}


def _composer_trainer() -> Variants:
    """Composer's Trainer with random batches."""
    from torch.utils.data import DataLoader

    # Composer imports torchvision, whose PyPI build fails at this call with a CPU build of torch.
    # Nothing of torchvision is used here.
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
    """Hugging Face Trainer: random batches, and batches grouped by length."""
    from torch.utils.data import Sampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    # Five of the 50 batches that the sampler sorts together: as many as a measurement has.
    stride = 10
    """Of the batches grouped by length, only every `stride`-th one is trained on."""

    class _Steps(TrainerCallback):
        def __init__(self, meter: Meter) -> None:
            self._meter = meter

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self._meter.step_ended()

    class _Grouped(Trainer):
        """Trainer on some of the sampler's batches, evenly spread over the lengths."""

        def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
            # The sampler sorts 50 batches by length, longest first. Without the stride a
            # measurement of fewer steps would see only long samples.
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
