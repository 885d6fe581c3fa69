"""Lengths of Wikipedia samples of at most 512 tokens, which lie beside the checkout, or do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

_LENGTHS = Path(__file__).parents[3] / "shared" / "data" / "wikipedia_lengths_512.json"

needs_histogram = pytest.mark.skipif(
    not _LENGTHS.is_file(), reason="the Wikipedia length histogram is not here"
)


def histogram() -> list[int]:
    """Entry s is the number of samples of s tokens."""
    return [0, *json.loads(_LENGTHS.read_text())["counts"]]
