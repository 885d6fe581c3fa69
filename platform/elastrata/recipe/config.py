"""The base of everything that a recipe configures: frozen, checked at birth, no unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A part of a recipe. Unknown keys are errors; values never change after creation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )
