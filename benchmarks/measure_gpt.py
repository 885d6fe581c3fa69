"""A process of benchmarks/gpt_quality.py: a causal model in transformers.

    python benchmarks/measure_gpt.py loss MODEL HELD_OUT
    python benchmarks/measure_gpt.py train MODEL HELD_OUT TOKENS SETTINGS

Prints the held-out loss as its last line; or, after a training run, the curve, a list of tokens
seen and held-out loss.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# Before the import of transformers, which reads it then.
os.environ |= {"HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

AT_ONCE, IGNORED = 16, -100
"""Documents per forward pass, and the label of padding."""


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Concatenated documents, cut into blocks of equal length."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        num_tokens = len(tokens) // length * length
        self._blocks = torch.from_numpy(tokens[:num_tokens].astype(np.int64)).view(-1, length)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._blocks[number], "labels": self._blocks[number]}


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: Path) -> float:
    """Return the mean loss over all tokens that have a predecessor in their document."""
    stored = np.load(held_out)
    parts = np.split(stored["tokens"].astype(np.int64), np.cumsum(stored["lengths"])[:-1])
    # Sorted by length, so that batches have little padding.
    parts = sorted((part for part in parts if len(part) > 1), key=len)
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(parts), AT_ONCE):
        documents = [torch.from_numpy(part) for part in parts[start : start + AT_ONCE]]
        # Padding is at the end, so a causal model does not attend to it.
        ids = nn.utils.rnn.pad_sequence(documents, batch_first=True)
        labels = nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=IGNORED)
        logits = model(input_ids=ids).logits[:, :-1].float()
        total += nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        ).item()
        count += sum(len(document) - 1 for document in documents)
    model.train()
    return total / count


def train(model: nn.Module, held_out: Path, tokens: Path, settings: dict[str, Any]) -> Any:
    curve: list[tuple[int, float]] = []
    per_step = settings["batch_size"] * settings["seq_len"]

    class Evaluation(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, __: Any, **___: Any) -> None:
            step = state.global_step
            if step % settings["every"] == 0 or step == settings["steps"]:
                curve.append((step * per_step, held_out_loss(model, held_out)))
                print(step, curve[-1], file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=settings["steps"],
            per_device_train_batch_size=settings["batch_size"],
            learning_rate=settings["lr"],
            adam_beta1=settings["betas"][0],
            adam_beta2=settings["betas"][1],
            adam_epsilon=settings["eps"],
            weight_decay=settings["weight_decay"],
            max_grad_norm=settings["max_norm"],
            warmup_steps=settings["warmup_steps"],
            lr_scheduler_type="linear",
            seed=settings["seed"],
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = Blocks(np.load(tokens), settings["seq_len"])
        Trainer(model, arguments, train_dataset=data, callbacks=[Evaluation()]).train()
    return curve


def main() -> None:
    what, model_folder, held_out, *train_arguments = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    if what == "loss":
        print(json.dumps(held_out_loss(model, Path(held_out))))
    else:
        print(
            json.dumps(
                train(
                    model, Path(held_out), Path(train_arguments[0]), json.loads(train_arguments[1])
                )
            )
        )


if __name__ == "__main__":
    main()
