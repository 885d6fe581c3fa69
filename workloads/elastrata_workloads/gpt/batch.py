"""The micro-batch GPT runs on: samples end to end, and the token that follows each."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata_workloads.unpadded.batch import UnpaddedBatch


@dataclass(frozen=True, kw_only=True)
class GptBatch(UnpaddedBatch):
    """N samples. Every token predicts the next one of its segment; the last one has none."""
