"""Masked language modelling (Devlin et al. 2019): some tokens are replaced, and predicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.sample_rng import SampleRng
from elastrata_workloads.unpadded.batch import UnpaddedBatch, filler, unpadded
from elastrata_workloads.unpadded.masking import MaskingRule, choose, replace, tables

_DROPOUT = 3


def masked(
    rows: Rows,
    vocabulary: Vocabulary,
    seed: int,
    rule: MaskingRule,
    *,
    dropout: bool,
    terms: Sequence[str],
) -> UnpaddedBatch:
    """The micro-batch of these samples; the same sample always gets the same masks.

    Args:
        rows: the samples, maybe none.
        vocabulary: their ids.
        seed: the run's.
        rule: how many tokens are masked.
        dropout: whether the batch carries dropout keys.
        terms: of the loss that every prediction counts in.

    Raises:
        ValueError: no mask token.
    """
    if vocabulary.mask_id is None:
        raise ValueError("the vocabulary has no mask token")
    if not len(rows):
        return filler(rows, pad_id=vocabulary.pad_id, dropout=dropout, terms=terms)
    rng, table = SampleRng(seed, rows), tables(vocabulary)
    predicted = choose(rows, rows.segment_starts, table, rule, rng)
    tokens = rows.tokens.astype(np.int64)
    targets = tokens[predicted]
    replace(tokens, predicted, vocabulary.mask_id, table, rng)
    return unpadded(
        rows,
        tokens=tokens,
        predicted=predicted,
        targets=targets,
        dropout_keys=rng.hashes(_DROPOUT) if dropout else None,
        terms=terms,
    )


def unmaskable(name: str, manifest: Manifest) -> list[str]:
    """A line per reason why a data set's tokens cannot be masked.

    Args:
        name: of the workload that would.
        manifest: the data set's.
    """
    vocabulary, lines = manifest.vocabulary, []
    if vocabulary.mask_id is None:
        lines.append(
            f"workload: {name} needs a tokenizer with a mask token; this data set's has none"
        )
    if vocabulary.size <= len(set(vocabulary.special_ids)):
        lines.append(f"workload: {name} needs tokens to mask; this data set has special ids only")
    return lines
