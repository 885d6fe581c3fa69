"""Cuts: a long text in parts that a tokenizer turns into the ids of the whole.

What a tokenizer needs besides a text takes many times the text's own memory, so that no text of
more than `MAX_CHARACTERS` is shown to it whole. Nearly all tokenizers look at words by themselves:
a text is cut where a word surely ends, and every such place is tried on what lies around it first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

MAX_CHARACTERS = 2**20
"""Shorter texts are never cut."""
_SEARCHED_CHARACTERS = 2**16
_TRIED_CHARACTERS = 256
_TRIED_PLACES = 16

Same = Callable[[str, str, str], bool]
"""Called with a text and its two parts: whether the parts' ids are those of the whole."""

_LETTER = r"[^\W\d_]"
_PLACES = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?<={_LETTER})(?= {_LETTER})",  # before a space
        rf"(?<={_LETTER})(?: )(?={_LETTER})",  # a space in front of every text comes back
        r"(?<=\S\n)(?=\S)",  # after a line feed
        r"(?<=\w)(?=[^\w\s'\u2019])",  # before a punctuation mark: scripts without spaces
    )
)
"""Where a word surely ends, the best place first; what matches is left out."""


def parts(text: str, same: Same, most: int = 0) -> Iterator[tuple[str, bool]]:
    """A text in parts of at most `most` characters, and whether each ends where `same` agreed.

    Parts without such a place near their end are cut where they are full. The last is True.

    Args:
        text: the text.
        same: what decides on a place.
        most: characters of a part; 0: `MAX_CHARACTERS`.
    """
    begin = 0
    most = most or MAX_CHARACTERS
    while len(text) - begin > most:
        place = _place(text, begin + most - min(_SEARCHED_CHARACTERS, most), begin + most, same)
        end, following = place or (begin + most,) * 2
        yield text[begin:end], place is not None
        begin = following
    yield (text[begin:] if begin else text), True


def _place(text: str, first: int, limit: int, same: Same) -> tuple[int, int] | None:
    """The last place before `limit` where `same` agrees: where a part ends and the next begins."""
    for pattern in _PLACES:
        found = [match.span() for match in pattern.finditer(text, first, limit)]
        for end, following in reversed(found[-_TRIED_PLACES:]):
            before, after = max(0, end - _TRIED_CHARACTERS), following + _TRIED_CHARACTERS
            if same(text[before:after], text[before:end], text[following:after]):
                return end, following
    return None
