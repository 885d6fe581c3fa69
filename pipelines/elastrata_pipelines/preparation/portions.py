"""Portions: consecutive documents of a few files, the unit of all work on a corpus.

A portion depends on the files only, never on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.checked_json import describe_error
from elastrata_pipelines.errors import escape_unprintable
from elastrata_pipelines.preparation.archives import FileReader, RefusedMember, has_archive_name
from elastrata_pipelines.preparation.config import PrepareConfig, SourceConfig
from elastrata_pipelines.preparation.pieces import DocumentTooLongError, Piece
from elastrata_pipelines.preparation.sources import SourceFile

_MIN_PORTION_BYTES, _MAX_PORTION_BYTES = 2 * 2**20, 64 * 2**20
_PORTIONS_AIMED_AT = 1024
_MAX_FILES = 2**14


@dataclass(frozen=True)
class Portion:
    """Documents of one source, and the problems that kept others from being read."""

    pieces: tuple[Piece, ...]
    problems: tuple[str, ...] = ()
    left_out: int = 0
    """Number of skipped files and archive members that cannot be read."""
    sidecars: int = 0
    """Number of archive members beside the data that were passed over."""

    @property
    def bytes(self) -> int:
        """Size of the text in bytes."""
        return sum(len(piece.data) for piece in self.pieces)


def portion_bytes(total_bytes: int) -> int:
    """Return the bytes of text in a portion."""
    # Proportional to the corpus, which bounds the number of portions.
    return min(max(total_bytes // _PORTIONS_AIMED_AT, _MIN_PORTION_BYTES), _MAX_PORTION_BYTES)


def group_files(files: Sequence[SourceFile], size: int) -> list[tuple[SourceFile, ...]]:
    """Group consecutive files of one source into groups of at least `size` bytes, if possible."""
    groups: list[list[SourceFile]] = []
    filled = 0
    for file in files:
        # The number of files is limited as well, since every file takes memory besides its text.
        fits = filled < size and groups and len(groups[-1]) < _MAX_FILES
        if not fits or file.source != groups[-1][0].source:
            groups.append([])
            filled = 0
        groups[-1].append(file)
        filled += file.bytes
    return [tuple(group) for group in groups]


def read_portions(
    files: Sequence[SourceFile],
    config: SourceConfig,
    *,
    size: int,
    max_document_bytes: int,
    skip: bool = False,
) -> Iterator[Portion]:
    """Yield the content of files of one source in portions of about `size` bytes.

    A file that cannot be read to its end becomes a problem of its portion, and reading continues.

    Args:
        files: files of the source.
        config: configuration of the source.
        size: approximate size of a portion.
        max_document_bytes: a longer document is a problem.
        skip: skip unreadable files completely.
    """
    pieces: list[Piece] = []
    problems: list[str] = []
    filled = left_out = sidecars = 0
    reader = FileReader(config, size, max_document_bytes)
    for file in files:
        begun = False
        try:
            refused: set[str] = set()
            # These files can be damaged in the middle. They are read twice, because their first
            # documents are passed on before the end is reached.
            if skip and (file.compression or file.kind == "parquet" or has_archive_name(file)):
                refused = {
                    one.name
                    for one in reader.pieces(file)
                    if isinstance(one, RefusedMember) and not one.is_sidecar
                }
            for piece in replace(reader, refused=refused).pieces(file):
                begun = True
                if isinstance(piece, Piece):
                    pieces.append(piece)
                    filled += len(piece.data)
                elif piece.is_sidecar:
                    sidecars += 1
                elif skip:
                    left_out += 1
                else:
                    problems.append(piece.problem)
                if filled >= size or max(len(pieces), len(problems)) >= _MAX_FILES:
                    yield Portion(tuple(pieces), tuple(problems), left_out, sidecars)
                    pieces, problems, filled, left_out, sidecars = [], [], 0, 0, 0
        except DocumentTooLongError as error:
            problems.append(str(error))
        # Every store, compression and format raises errors of other classes.
        except Exception as error:
            if skip and not begun:
                left_out += 1
            else:
                problems.append(
                    f"{file.shown}: cannot be read ({escape_unprintable(describe_error(error))})"
                )
    if pieces or problems or left_out or sidecars:
        yield Portion(tuple(pieces), tuple(problems), left_out, sidecars)


Place = tuple[int, int]
"""Place of a portion in the corpus: the number of its group, and its number in the group."""
Repeats = npt.NDArray[np.uint8]
"""Mark of each document that passes the filters: 0 to keep it, or the number of a reason."""
_NONE = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class Group:
    """Files that are read by one process."""

    number: int
    files: tuple[SourceFile, ...]
    repeats: Mapping[int, Repeats] | None = None
    """Marks by number of the portion; None before duplicates are looked for."""


@dataclass(frozen=True)
class NumberedPortion:
    """A portion with its place in the corpus."""

    place: Place
    source: int
    portion: Portion
    repeats: Repeats | None = None
    """Marks of its documents; None before duplicates are looked for."""


@dataclass(frozen=True)
class ReadWork:
    """Task that reads a group of files in portions."""

    config: PrepareConfig
    portion_bytes: int

    def __call__(self, group: Group) -> Iterator[NumberedPortion]:
        """Yield the portions, in order."""
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
