"""The base of what `data.prepare` configures."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, field_validator

from elastrata_pipelines.configured_text import refuse_secrets, refuse_unprintable


class ConfigPart(BaseModel):
    """Frozen; unknown keys are errors, and so are secrets in URLs and control characters."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @field_validator("*")
    @classmethod
    def _can_be_written_down(cls, value: object) -> object:
        refuse_secrets(value)
        refuse_unprintable(value)
        return value
