"""What a user's mistake looks like: one line per problem, all problems at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Input that cannot work, told in one line per problem.

    Commands print each line to standard error and exit with 2; nothing is written by then.

    Args:
        problems: a complete line each: what is wrong, where (file, key, value), what was expected.
    """

    def __init__(self, *problems: str) -> None:
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
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{found[0]}'?)" if found else ""
