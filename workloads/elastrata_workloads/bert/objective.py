"""BERT's objective: masked language modelling, and next-sentence prediction where wanted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from elastrata.core.workload import Loss, Metric
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.sample_rng import SampleRng
from elastrata_workloads.bert.batch import BertBatch
from elastrata_workloads.bert.masking import Ints, MaskingRule, choose, replace, tables
from elastrata_workloads.unpadded.batch import FILLER_TOKENS
from elastrata_workloads.unpadded.logits import cross_entropy
from elastrata_workloads.unpadded.sources import source_losses, source_weights, sources_of

_DROPOUT = 3


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective: masked tokens, and next sentences where wanted."""

    masking: MaskingRule
    next_sentence: bool
    dropout: bool
    """Whether batches carry dropout keys."""
    z_loss: bool = False
    """Whether the masked tokens' predictions count in a term of z-loss, too."""

    def collate(self, rows: Rows, vocabulary: Vocabulary, seed: int) -> BertBatch:
        """The micro-batch of these samples; the same sample always gets the same masks.

        Raises:
            ValueError: no mask token, or next-sentence prediction without pairs.
        """
        if vocabulary.mask_id is None:
            raise ValueError("the vocabulary has no mask token")
        if not len(rows):
            return self._filler(rows, vocabulary.pad_id)
        rng = SampleRng(seed, rows)
        starts, lengths = rows.segment_starts, rows.segment_lengths
        table = tables(vocabulary)
        predicted = choose(rows, starts, table, self.masking, rng)
        tokens = rows.tokens.astype(np.int64)
        targets = tokens[predicted]
        replace(tokens, predicted, vocabulary.mask_id, table, rng)
        sample_starts = np.cumsum(rows.lengths) - rows.lengths
        not_next = _not_next(rows) if self.next_sentence else None
        sources = sources_of(rows, predicted)
        return BertBatch(
            weights=self._weights(len(predicted), len(rows)) | source_weights(rows, sources),
            num_positions=len(tokens),
            input_ids=torch.from_numpy(tokens),
            positions=torch.from_numpy(np.arange(len(tokens)) - np.repeat(starts, lengths)),
            token_types=_token_types(rows, sample_starts),
            offsets=torch.from_numpy(np.append(starts, len(tokens)).astype(np.int32)),
            segment_lengths=tuple(lengths.tolist()),
            predicted=torch.from_numpy(predicted),
            targets=torch.from_numpy(targets),
            sample_starts=torch.from_numpy(sample_starts) if self.next_sentence else None,
            not_next=not_next,
            dropout_keys=(
                torch.from_numpy(rng.hashes(_DROPOUT).view(np.int64)) if self.dropout else None
            ),
            sources=sources,
            source_names=rows.source_names,
        )

    def _weights(self, num_predicted: int, num_samples: int) -> dict[str, float]:
        """By loss term."""
        weights = {"mlm": float(num_predicted)}
        if self.next_sentence:
            weights["nsp"] = float(num_samples)
        if self.z_loss:
            weights["z"] = float(num_predicted)
        return weights

    def _filler(self, rows: Rows, pad_id: int) -> BertBatch:
        """The micro-batch without samples."""
        zeros = torch.zeros(FILLER_TOKENS, dtype=torch.int64)
        nothing = zeros[:0]
        pairs = nothing if self.next_sentence else None
        return BertBatch(
            weights=self._weights(0, 0) | source_weights(rows, None),
            num_positions=FILLER_TOKENS,
            input_ids=torch.full_like(zeros, pad_id),
            positions=torch.arange(FILLER_TOKENS),
            token_types=zeros if self.next_sentence else None,
            offsets=torch.tensor([0, FILLER_TOKENS], dtype=torch.int32),
            segment_lengths=(FILLER_TOKENS,),
            predicted=nothing,
            targets=nothing,
            sample_starts=pairs,
            not_next=pairs,
            dropout_keys=zeros if self.dropout else None,
            sources=nothing if rows.source_names else None,
            source_names=rows.source_names,
        )


def loss(logits: Tensor, next_logits: Tensor | None, batch: BertBatch, z_loss: float = 0.0) -> Loss:
    """Cross-entropy sums, in fp32 whatever the model computes in, and counts of right answers.

    Args:
        logits: shape [P, V]; maybe divided over ranks.
        next_logits: shape [N, 2], or None without next-sentence prediction.
        batch: what `logits` were computed from.
        z_loss: coefficient of the squared logarithm of each masked token's sum of exponentials.
    """
    with_each = batch.sources is not None
    mlm = cross_entropy(logits, batch.targets, with_squares=z_loss > 0, with_each=with_each)
    terms = {"mlm": mlm.total}
    metrics = {"mlm_accuracy": Metric(mlm.num_right, per="mlm")}
    if next_logits is not None and batch.not_next is not None:
        nsp = cross_entropy(next_logits, batch.not_next)
        terms["nsp"] = nsp.total
        metrics["nsp_accuracy"] = Metric(nsp.num_right, per="nsp")
    if mlm.squares is not None:
        terms["z"] = z_loss * mlm.squares
    return Loss(terms, metrics | source_losses(mlm.each, batch.sources, batch.source_names))


def _token_types(rows: Rows, sample_starts: Ints) -> Tensor | None:
    if rows.second_starts is None:
        return None
    places = np.arange(len(rows.tokens)) - np.repeat(sample_starts, rows.lengths)
    second = places >= np.repeat(rows.second_starts, rows.lengths)
    return torch.from_numpy(second.astype(np.int64))


def _not_next(rows: Rows) -> Tensor:
    if rows.is_next is None:
        raise ValueError("next-sentence prediction needs sentence pairs")
    return torch.from_numpy((~rows.is_next).astype(np.int64))
