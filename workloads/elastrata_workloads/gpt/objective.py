"""GPT's objective: the next token of every token but the last of its segment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from elastrata.core.workload import Loss, Metric
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.sample_rng import SampleRng
from elastrata_workloads.gpt.batch import GptBatch
from elastrata_workloads.unpadded.batch import FILLER_TOKENS
from elastrata_workloads.unpadded.logits import cross_entropy
from elastrata_workloads.unpadded.sources import source_losses, source_weights, sources_of

_DROPOUT = 1


def collate(
    rows: Rows, *, pad_id: int, seed: int, dropout: bool, terms: Sequence[str] = ("lm",)
) -> GptBatch:
    """The micro-batch of these samples.

    Positions start anew in every document of a packed sample, and no document's last token predicts
    the first of the next.

    Args:
        rows: the samples.
        pad_id: what the batch without samples is filled with.
        seed: the run's.
        dropout: whether the batch carries dropout keys.
        terms: of the loss; every prediction counts in each.
    """
    if not len(rows):
        return _filler(rows, pad_id, dropout, terms)
    starts, lengths = rows.segment_starts, rows.segment_lengths
    tokens = rows.tokens.astype(np.int64)
    numbers = np.arange(len(tokens))
    predicted = np.delete(numbers, starts + lengths - 1)
    keys = SampleRng(seed, rows).hashes(_DROPOUT).view(np.int64) if dropout else None
    sources = sources_of(rows, predicted)
    return GptBatch(
        weights=dict.fromkeys(terms, float(len(predicted))) | source_weights(rows, sources),
        num_positions=len(tokens),
        input_ids=torch.from_numpy(tokens),
        positions=torch.from_numpy(numbers - np.repeat(starts, lengths)),
        offsets=torch.from_numpy(np.append(starts, len(tokens)).astype(np.int32)),
        segment_lengths=tuple(lengths.tolist()),
        predicted=torch.from_numpy(predicted),
        targets=torch.from_numpy(tokens[predicted + 1]),
        dropout_keys=None if keys is None else torch.from_numpy(keys),
        sources=sources,
        source_names=rows.source_names,
    )


def _filler(rows: Rows, pad_id: int, dropout: bool, terms: Sequence[str]) -> GptBatch:
    """The micro-batch without samples."""
    zeros = torch.zeros(FILLER_TOKENS, dtype=torch.int64)
    return GptBatch(
        weights=dict.fromkeys(terms, 0.0) | source_weights(rows, None),
        num_positions=FILLER_TOKENS,
        input_ids=torch.full_like(zeros, pad_id),
        positions=torch.arange(FILLER_TOKENS),
        offsets=torch.tensor([0, FILLER_TOKENS], dtype=torch.int32),
        segment_lengths=(FILLER_TOKENS,),
        predicted=zeros[:0],
        targets=zeros[:0],
        dropout_keys=zeros if dropout else None,
        sources=zeros[:0] if rows.source_names else None,
        source_names=rows.source_names,
    )


def loss(logits: Tensor, batch: GptBatch, z_loss: float = 0.0) -> Loss:
    """Cross-entropy sum, in fp32 whatever the model computes in, and the number of right answers.

    Args:
        logits: shape [P, V]; maybe divided over ranks.
        batch: what `logits` were computed from.
        z_loss: coefficient of the squared logarithm of each prediction's sum of exponentials.
    """
    with_each = batch.sources is not None
    found = cross_entropy(logits, batch.targets, with_squares=z_loss > 0, with_each=with_each)
    terms = {"lm": found.total}
    if found.squares is not None:
        terms["z"] = z_loss * found.squares
    by_source = source_losses(found.each, batch.sources, batch.source_names)
    return Loss(terms, {"lm_accuracy": Metric(found.num_right, per="lm"), **by_source})
