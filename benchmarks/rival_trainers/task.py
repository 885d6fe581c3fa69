"""The task of every trainer: samples, model and settings; and the meter of its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from data_loaders.samples import Samples
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling

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
