"""GPT's objective: predict the next token of every token but a segment's last one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastrata_pipelines.rows import Rows, SampleRng
from elastrata_workloads.unpadded.batch import UnpaddedBatch, filler_batch, unpad

_DROPOUT = 1


def collate(
    rows: Rows, *, pad_id: int, seed: int, dropout: bool, terms: Sequence[str] = ("lm",)
) -> UnpaddedBatch:
    """Return the micro-batch of `rows`.

    Positions restart in every document of a packed sample, and the last token of a document does
    not predict the first one of the next.
    """
    if not len(rows):
        return filler_batch(rows, pad_id=pad_id, dropout=dropout, terms=terms)
    tokens = rows.tokens.astype(np.int64)
    # The last token of a segment has no target.
    lasts = rows.segment_starts + rows.segment_lengths - 1
    predicted = np.delete(np.arange(len(tokens)), lasts)
    return unpad(
        rows,
        tokens=tokens,
        predicted=predicted,
        targets=tokens[predicted + 1],
        dropout_keys=SampleRng(seed, rows).hashes(_DROPOUT) if dropout else None,
        terms=terms,
    )
