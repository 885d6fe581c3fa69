"""The base of what a recipe configures: frozen, checked at birth, no unknown keys, no secrets, no
control characters."""

from __future__ import annotations

from elastrata_pipelines.configured_text import ConfigPart

NAME = "^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
"""The form of names that become parts of metrics and folders."""


class Config(ConfigPart):
    """A part of a recipe."""
