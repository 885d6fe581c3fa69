"""User errors: one line per problem, and all problems together."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterable

from elastrata_pipelines.url_secrets import hide_secrets

# Names in messages can be arbitrarily long.
_MOST_CHARACTERS = 4000
"""Maximum number of characters in a line."""
# difflib takes quadratic time.
_MOST_COMPARED = 100
# Line ends, cursor movement, reversed text, and surrogates, which cannot be written.
_BREAKING = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that are escaped in messages."""
_CONTROLS = re.compile(rf"(?![\n\t\ud800-\udfff]){_BREAKING.pattern}")
"""The same, without the ends of lines and tabs, which a text of several lines has, and without
surrogates, which the stream escapes."""


class UserError(Exception):
    """Invalid input, described in one line per problem.

    Commands print each line to standard error and exit with status 2; nothing has been written by
    then.

    Args:
        problems: complete lines that name the problem, its place (file, key, value), and the
            expected value. Unprintable characters are escaped, and secrets in URLs are hidden.
    """

    def __init__(self, *problems: str) -> None:
        problems = tuple(map(_one_line, problems))
        super().__init__("\n".join(problems))
        self.problems = problems

    # By default, exceptions are unpickled from `args`, which hold the joined text.
    def __reduce__(self) -> tuple[type[UserError], tuple[str, ...]]:
        return type(self), self.problems


def escape_unprintable(text: str) -> str:
    """Return a text, such as a file name, with its unprintable characters escaped."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def pluralize(count: float | str, noun: str, form: str = ",") -> str:
    """Return a count with its noun: `1 batch`, `1,024 batches`.

    Args:
        count: the number, or a word in its place.
        noun: the noun in the singular.
        form: format of the number.
    """
    number = count if isinstance(count, str) else format(count, form)
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number} {noun}{ending if number.strip() != '1' else ''}"


def format_command(*words: object) -> str:
    """Return a command line that a shell reads as exactly these words."""
    return " ".join(map(_quote, map(str, words)))


def _quote(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    # Control characters and undecodable bytes, in the form that bash and zsh read.
    escaped = os.fsencode(word).decode("latin-1").encode("unicode_escape").decode()
    return "$'" + escaped.replace("'", r"\'") + "'"


def escape_controls(text: str, *, one_line: bool = False) -> str:
    """Return a text that may come from a file with all characters escaped that would move a
    terminal's cursor, change its state, or reverse other text.

    Args:
        text: any text.
        one_line: True to escape the ends of lines and tabs, too.
    """
    controls = _BREAKING if one_line else _CONTROLS
    return controls.sub(lambda found: repr(found.group())[1:-1], text)


def suggest_nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name closest to `name`, for the end of a message; may be empty."""
    if len(name) > _MOST_COMPARED:
        return ""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def _one_line(text: str) -> str:
    text = hide_secrets(text)
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2 - 2
        text = f"{text[:half]}...{text[-half:]}"
    return escape_controls(text, one_line=True)
