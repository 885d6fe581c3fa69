"""A user's mistake: one line per problem, all problems at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from elastrata_pipelines.url_secrets import hide_secrets

_MOST_CHARACTERS = 4000
"""Most characters of a line: a name may be as long as somebody wants it."""
_MOST_COMPARED = 100
_BREAKING = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that would end a line, move the cursor, turn text around, or cannot be written at
all."""


class UserError(Exception):
    """Input that cannot work, told in one line per problem.

    Commands print each line to standard error and exit with 2; nothing is written by then.

    Args:
        problems: a complete line each: what is wrong, where (file, key, value), what was expected.
            What is no printable character of a line is shown as Python writes it, and secrets in
            URLs are not shown.
    """

    def __init__(self, *problems: str) -> None:
        problems = tuple(map(_one_line, problems))
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type[UserError], tuple[str, ...]]:
        return type(self), self.problems


def in_one_line(text: str) -> str:
    """A text, such as a file's name, as a line can hold it: what cannot be printed is escaped."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name closest to `name`, for the end of a message; maybe empty."""
    if len(name) > _MOST_COMPARED:
        return ""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def _one_line(text: str) -> str:
    text = hide_secrets(text)
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2 - 2
        text = f"{text[:half]}...{text[-half:]}"
    return _BREAKING.sub(lambda found: repr(found.group())[1:-1], text)
