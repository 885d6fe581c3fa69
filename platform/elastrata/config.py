"""Base class of recipe sections: frozen and validated, without unknown keys, secrets or control
characters."""

from __future__ import annotations

from elastrata_pipelines.configured_text import ConfigPart

NAME = "^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
"""Pattern of names that become parts of metrics and folders."""


class Config(ConfigPart):
    """A section of a recipe."""
