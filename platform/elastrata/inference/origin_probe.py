"""What an encoder's hidden states know of a text that nobody told it: the package it comes from.

L: positions of a batch of texts, padding included; N: texts; E: hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGES, KNOWN, ASKED = 8, 80, 40
"""How many packages are told apart; and of each, how many texts a classifier learns from, and how
many others it is asked for."""
_SHORTEST, _LONGEST = 80, 2000
"""Characters of a text."""
_FROM_A_FILE = 10
"""Texts, at most."""
_RIDGE = 0.1
"""Times the number of texts that are learnt from; features have mean 0 and variance 1."""
_ROWS = 32
Labelled = Sequence[tuple[str, int]]
"""Texts, each with the number of its package, from 0."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Shares of right answers of a linear classifier of mean hidden states."""

    trained: float
    untrained: float
    """Of the same model with weights as they are drawn."""
    chance: float
    """Of one who guesses."""


def probe(model: Path, corpus: Path) -> Probe | None:
    """Tells packages apart by the hidden states of an exported encoder.

    Args:
        model: a folder that `from_pretrained` loads.
        corpus: a folder of Python sources; packages are the folders in it.

    Returns:
        None: the corpus has too few texts.
    """
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    texts = texts_of(corpus)
    if texts is None:
        return None
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model))
    trained: Any = AutoModel.from_pretrained(str(model), dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(str(model), dtype=torch.float32)
        anew: Any = AutoModel.from_config
        untrained = anew(config)
    return Probe(
        trained=_share_right(trained, tokenizer, *texts),
        untrained=_share_right(untrained, tokenizer, *texts),
        chance=1 / PACKAGES,
    )


def texts_of(corpus: Path) -> tuple[Labelled, Labelled] | None:
    """Paragraphs of a corpus' packages, the first that have enough of them: those whose package is
    known, and those that are asked for, which are from other files. None: there are not enough."""
    packages: list[tuple[list[str], list[str]]] = []
    for folder in sorted(path for path in corpus.iterdir() if path.is_dir()):
        files = sorted(folder.rglob("*.py"))
        known = list(islice(_paragraphs(files[::2]), KNOWN))
        asked = list(islice(_paragraphs(files[1::2]), ASKED))
        if (len(known), len(asked)) == (KNOWN, ASKED):
            packages.append((known, asked))
    if len(packages) < PACKAGES:
        return None
    numbered = list(enumerate(packages[:PACKAGES]))
    return (
        [(text, number) for number, (known, _) in numbered for text in known],
        [(text, number) for number, (_, asked) in numbered for text in asked],
    )


def _paragraphs(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        parts = (part.strip() for part in re.split(r"\n\s*\n", file.read_text(encoding="utf-8")))
        long_enough = (part for part in parts if _SHORTEST <= len(part) <= _LONGEST)
        yield from islice(long_enough, _FROM_A_FILE)


def _share_right(model: Any, tokenizer: Any, known: Labelled, asked: Labelled) -> float:
    """Of those that are asked for, by ridge regression onto the packages of those known."""
    features, others = (_features(model, tokenizer, texts) for texts in (known, asked))
    mean, deviation = features.mean(0), features.std(0) + 1e-6
    features, others = ((values - mean) / deviation for values in (features, others))
    targets = torch.nn.functional.one_hot(_numbers(known), PACKAGES).double() - 1 / PACKAGES
    penalty = _RIDGE * len(known) * torch.eye(features.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(features.T @ features + penalty, features.T @ targets)
    return float(((others @ weights).argmax(1) == _numbers(asked)).double().mean())


def _numbers(texts: Labelled) -> Tensor:
    return torch.tensor([number for _, number in texts])


@torch.inference_mode()
def _features(model: Any, tokenizer: Any, texts: Labelled) -> Tensor:
    """The mean hidden state of each, shape [N, E], fp64."""
    model.eval()
    longest = min(model.config.max_position_embeddings, tokenizer.model_max_length)
    found = []
    for first in range(0, len(texts), _ROWS):
        batch: Mapping[str, Tensor] = tokenizer(
            [text for text, _ in texts[first : first + _ROWS]],
            padding=True,
            truncation=True,
            max_length=longest,
            return_tensors="pt",
        )
        mask = batch["attention_mask"]  # shape [rows, L]
        hidden = model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
        sums = (hidden * mask[:, :, None]).sum(1)
        found.append((sums / mask.sum(1, keepdim=True)).double())
    return torch.cat(found)
