"""BERT's batch and objective: masked language modelling and next-sentence prediction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from elastrata.workload.workload import Loss, Metric
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_workloads.unpadded.batch import UnpaddedBatch
from elastrata_workloads.unpadded.loss import cross_entropy, loss_terms, prediction_loss
from elastrata_workloads.unpadded.masked_lm import Ints, MaskingRule, mask_rows


@dataclass(frozen=True, kw_only=True)
class BertBatch(UnpaddedBatch):
    """N samples with masked tokens in `input_ids`; the targets are the original ids."""

    token_types: Tensor | None
    """Shape [T], int64: 0 in the first sentence, 1 in the second; None without pairs."""
    sample_starts: Tensor | None
    """Shape [N], int64: index of each sample's first token; None unless next sentences are
    predicted."""
    not_next: Tensor | None
    """Shape [N], int64: 1 if the second sentence does not follow the first; None unless next
    sentences are predicted."""

    @property
    @override
    def _per_token(self) -> tuple[str, ...]:
        return (*super()._per_token, "token_types")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """BERT's objective: masked tokens and, optionally, next sentences."""

    masking: MaskingRule
    next_sentence: bool
    dropout: bool
    """Whether batches carry dropout keys."""
    z_loss: bool = False
    """Whether the masked tokens' predictions also count in a z-loss term."""

    def collate(self, rows: Rows, vocabulary: Vocabulary, seed: int) -> BertBatch:
        """Return the micro-batch of `rows`; the same sample and epoch always get the same masks.

        Raises:
            ValueError: the vocabulary has no mask token, or next-sentence prediction has no pairs.
        """
        terms = loss_terms("mlm", self.z_loss)
        batch = mask_rows(rows, vocabulary, seed, self.masking, dropout=self.dropout, terms=terms)
        weights = batch.weights
        if self.next_sentence:
            # `nsp` counts samples, not predicted tokens.
            weights = {"mlm": weights["mlm"], "nsp": float(len(rows)), **weights}
        sentences = self._sentence_fields(rows, len(batch.input_ids))
        return BertBatch(**{**vars(batch), "weights": weights, **sentences})

    def _sentence_fields(self, rows: Rows, num_tokens: int) -> dict[str, Tensor | None]:
        """Return the batch fields for sentence pairs."""
        starts = (np.cumsum(rows.lengths) - rows.lengths).astype(np.int64)
        if len(rows):
            types = _token_types(rows, starts)
        else:
            # A batch without samples has the same fields as every other one.
            types = torch.zeros(num_tokens, dtype=torch.int64) if self.next_sentence else None
        return {
            "token_types": types,
            "sample_starts": torch.from_numpy(starts) if self.next_sentence else None,
            "not_next": _not_next(rows) if self.next_sentence else None,
        }


def loss(logits: Tensor, next_logits: Tensor | None, batch: BertBatch, z_loss: float = 0.0) -> Loss:
    """Return cross-entropy sums, always in fp32, and counts of correct predictions.

    Args:
        logits: shape [P, V]; may be sharded over ranks.
        next_logits: shape [N, 2], or None without next-sentence prediction.
        batch: the batch of these logits.
        z_loss: coefficient of each masked token's squared log-sum-exp.
    """
    masked_tokens = prediction_loss("mlm", logits, batch, z_loss)
    if next_logits is None or batch.not_next is None:
        return masked_tokens
    nsp = cross_entropy(next_logits, batch.not_next)
    return Loss(
        {"mlm": masked_tokens.terms["mlm"], "nsp": nsp.total, **masked_tokens.terms},
        {**masked_tokens.metrics, "nsp_accuracy": Metric(nsp.num_right, per="nsp")},
    )


def _token_types(rows: Rows, sample_starts: Ints) -> Tensor | None:
    if rows.second_starts is None:
        return None
    places = np.arange(len(rows.tokens)) - np.repeat(sample_starts, rows.lengths)
    second = places >= np.repeat(rows.second_starts, rows.lengths)
    return torch.from_numpy(second.astype(np.int64))


def _not_next(rows: Rows) -> Tensor:
    if not len(rows):
        return torch.zeros(0, dtype=torch.int64)
    if rows.is_next is None:
        raise ValueError("next-sentence prediction needs sentence pairs")
    return torch.from_numpy((~rows.is_next).astype(np.int64))
