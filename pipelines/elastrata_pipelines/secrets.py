"""Secrets in URLs: refused wherever a URL is configured, as configuration is written down."""

from __future__ import annotations

import re

_HIDDEN = "***"
_PASSWORD = re.compile(r"(?<=://)[^/?#\s@:]*:[^/?#\s]*(?=@)")
_SIGNED = re.compile(
    r"(?<=[?&])(?P<name>sig|[\w-]*(?:passw(?:or)?d|secret|token|signature|credential|access-?key))="
    r"[^&#\s]+",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """The text with `***` for every user's password and every signature in a URL."""
    return _SIGNED.sub(rf"\g<name>={_HIDDEN}", _PASSWORD.sub(_HIDDEN, text))


def refuse_secrets(value: object) -> None:
    """Makes sure that a configured value can be written down.

    Args:
        value: any; texts, and those in lists, are looked at.

    Raises:
        ValueError: a URL in it holds a secret.
    """
    if isinstance(value, list | tuple):
        for item in value:
            refuse_secrets(item)
    elif isinstance(value, str) and without_secrets(value) != value:
        raise ValueError(
            "expected no secret in a URL: recipes are written down; leave it to the environment "
            "or to the service's own file"
        )
