"""Segments: where attention stops."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """Where attention stops: a segment is a sample, or one document of a packed sample."""

    offsets: Tensor
    """Shape [G + 1], int32, on the model's device: starts of the segments, then T."""
    lengths: tuple[int, ...]
    """The same as G lengths, known to the host without asking the device."""
    longest: int
    """No segment is longer. Rounded up, so that compiled blocks see few different numbers."""
