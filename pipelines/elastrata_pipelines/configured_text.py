"""Text in configuration: one line of printable characters, not longer than anybody would write.

It holds no secret in a URL, as configuration is written down.
"""

from __future__ import annotations

import re

MOST_CHARACTERS = 4096
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_HIDDEN = "***"
_PASSWORD = re.compile(r"(?<=://)[^/?#\s@:]*:[^/?#\s]*(?=@)")
_SIGNED = re.compile(
    r"(?<=[?&])(?P<name>sig|[\w-]*(?:passw(?:or)?d|secret|token|signature|credential|access-?key))="
    r"[^&#\s]+",
    re.IGNORECASE,
)


def refuse_unprintable(value: object) -> None:
    """Makes sure that a configured text can be shown, logged and be part of a path.

    Args:
        value: any; texts, and those in lists, are looked at.

    Raises:
        ValueError: a text is longer than `MOST_CHARACTERS`, or holds a line break or another
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
