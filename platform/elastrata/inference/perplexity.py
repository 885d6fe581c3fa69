"""Perplexity: how surprised a model is by a text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from elastrata.inference.language_model import LanguageModel
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.preparation.packing import Texts, cut


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Over all tokens of a text that have one before them."""

    perplexity: float
    """e to the power of `loss`."""
    loss: float
    """Mean cross-entropy per token, in nats."""
    tokens: int
    """That were predicted."""


@torch.inference_mode()
def perplexity(model: LanguageModel, text: str) -> Perplexity:
    """The perplexity of a text, cut as `prepare` cuts a document: into samples, one after the
    other, of as many tokens as the model sees, each predicted from its own sample alone.

    Raises:
        UserError: the text is too short to predict any token.
    """
    tokens = np.array(model.tokenizer.encode(text), dtype=np.uint32)
    whole = Texts(ids=np.zeros(1, np.uint64), lengths=np.array([len(tokens)]), tokens=tokens)
    samples = cut(whole, model.frame, seq_len=model.max_positions, min_tokens=1)
    total, count = 0.0, 0
    for sample in np.split(samples.tokens, np.cumsum(samples.lengths)[:-1]):
        if len(sample) < 2:
            continue
        ids = torch.from_numpy(sample.astype(np.int64)).to(model.device)
        logits = model.network(input_ids=ids[None]).logits[0, :-1].float()
        total += F.cross_entropy(logits, ids[1:], reduction="sum").item()
        count += len(ids) - 1
    if not count:
        raise UserError("--file: expected a text of two tokens at least")
    return Perplexity(perplexity=math.exp(total / count), loss=total / count, tokens=count)
