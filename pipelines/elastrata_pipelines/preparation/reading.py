"""Reading: the files of a corpus, group by group, in portions that know their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.preparation.config import PrepareConfig
from elastrata_pipelines.preparation.portions import Portion, read_portions
from elastrata_pipelines.preparation.sources import SourceFile

Place = tuple[int, int]
"""Of a portion in the corpus: its group, and its number there."""
Repeats = npt.NDArray[np.uint8]
"""By document of a portion that passes the filters: 0, or why it is left out."""
_NONE = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class Group:
    """Files that one process reads."""

    number: int
    files: tuple[SourceFile, ...]
    repeats: Mapping[int, Repeats] | None = None
    """By number of its portions; None: nobody has asked."""


@dataclass(frozen=True)
class NumberedPortion:
    """A portion and its place in the corpus."""

    place: Place
    source: int
    portion: Portion
    repeats: Repeats | None = None
    """Which of its documents have been there before; None: nobody has asked."""


@dataclass(frozen=True)
class ReadWork:
    """Reads a group of files in portions."""

    config: PrepareConfig
    portion_bytes: int

    def __call__(self, group: Group) -> Iterator[NumberedPortion]:
        """The portions, in order."""
        source = group.files[0].source
        portions = read_portions(
            group.files,
            self.config.all_sources[source],
            size=self.portion_bytes,
            max_document_bytes=self.config.max_document_bytes,
            skip=self.config.bad_documents == "skip",
        )
        for number, portion in enumerate(portions):
            marks = None if group.repeats is None else group.repeats.get(number, _NONE)
            yield NumberedPortion((group.number, number), source, portion, marks)
