"""The place of a run that a state is saved at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The progress, and more values, that a commit keeps beside the state."""

    step: int
    samples: int
    tokens: int
    extra: Mapping[str, Any]
