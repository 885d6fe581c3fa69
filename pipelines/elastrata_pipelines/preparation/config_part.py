"""The base of what `data.prepare` configures."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, field_validator

from elastrata_pipelines.configured_text import refuse_unprintable
from elastrata_pipelines.url_secrets import refuse_secrets


class ConfigPart(BaseModel):
    """Frozen; unknown keys are errors, and so are secrets in URLs and control characters."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # pydantic would print a URL with all that is in it
    )

    @field_validator("*")
    @classmethod
    def _can_be_written_down(cls, value: object) -> object:
        refuse_secrets(value)
        refuse_unprintable(value)
        return value
