"""Configured text: one line of printable characters, of limited length, without secrets in URLs.

Configuration is recorded with every run, so it must not hold secrets (see `url_secrets`).
"""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, field_validator

from elastrata_pipelines.url_secrets import hide_unrecorded_parts, refuse_secrets

__all__ = ["MOST_CHARACTERS", "hide_unrecorded_parts", "refuse_secrets", "refuse_unprintable"]
MOST_CHARACTERS = 4096
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def refuse_unprintable(value: object) -> None:
    """Check that a configured text can be shown, logged and used in a path.

    Args:
        value: any value; texts, and texts in lists, are checked.

    Raises:
        ValueError: a text is longer than `MOST_CHARACTERS`, or contains a line break or another
            control character.
    """
    if isinstance(value, list | tuple):
        for item in value:
            refuse_unprintable(item)
    elif isinstance(value, str):
        if len(value) > MOST_CHARACTERS:
            raise ValueError(
                f"{len(value):,} characters: expected a text of at most {MOST_CHARACTERS:,}"
            )
        if found := _UNPRINTABLE.search(value):
            raise ValueError(
                f"expected a text without control characters, such as {found.group()!r}"
            )


class ConfigPart(BaseModel):
    """Frozen; unknown keys are errors, and so are secrets in URLs and control characters."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        # By default, pydantic prints the whole URL.
        hide_input_in_errors=True,
    )

    @field_validator("*")
    @classmethod
    def _can_be_written_down(cls, value: object) -> object:
        refuse_secrets(value)
        refuse_unprintable(value)
        return value
