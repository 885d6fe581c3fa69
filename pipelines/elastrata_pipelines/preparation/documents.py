"""Documents: the texts in a portion, with identities that do not change if a corpus is moved."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.hashing import combine_one, mix_one, text_hash, uniform_one, utf8_size
from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.not_text import is_binary
from elastrata_pipelines.preparation.pieces import Piece, describe_too_long
from elastrata_pipelines.preparation.portions import Portion
from elastrata_pipelines.preparation.tables import is_encodable, text_of_line

_BLANK_LINES = re.compile(r"\n(?:[ \t\r]*\n)+")
_LEADING_BLANK_LINES = re.compile(r"(?:[ \t\r]*\n)+")
_BOM = b"\xef\xbb\xbf"
_HELD_OUT_SALT, _COPY_SALT = text_hash("held-out"), text_hash("copy")


@dataclass(frozen=True, slots=True)
class Document:
    """One text."""

    id: int
    """64-bit hash of source, file and place in the file."""
    text: str
    line: int = 0
    """First line, or row, counted from 0."""
    file: str = ""
    """URL of the file in printable form."""


@dataclass(frozen=True)
class Documents:
    """Documents of a portion, in order, without blank ones."""

    documents: list[Document]
    problems: list[str]
    """One line for each document that could not be read."""
    fatal: tuple[str, ...]
    """One line for each file or overlong document that could not be read to its end."""


def read_documents(portion: Portion, config: SourceConfig, *, max_document_bytes: int) -> Documents:
    """Decode and parse a portion of a source."""
    documents: list[Document] = []
    problems: list[str] = []
    fatal = list(portion.problems)
    for piece in portion.pieces:
        # File names may not be UTF-8.
        name = piece.file.name.encode(errors="surrogateescape")
        identity = text_hash(config.name or "", name)
        for line, text in _texts(piece, config, problems):
            # A character takes at most 4 bytes, so short texts need not be measured.
            if len(text) * 4 > max_document_bytes and utf8_size(text) > max_document_bytes:
                fatal.append(describe_too_long(piece.file, line, max_document_bytes))
            elif is_binary(text):
                problems.append(
                    f"{piece.file.shown}:{line + 1}: control characters: binary data, not text"
                )
            elif text and not text.isspace():
                documents.append(
                    Document(combine_one(identity, line), text, line, piece.file.shown)
                )
    return Documents(documents, problems, tuple(fatal))


def _texts(piece: Piece, config: SourceConfig, problems: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the line (or row) and the text of each document of a piece."""
    if piece.ends is not None:
        yield from _row_texts(piece, piece.ends, config.text_field, problems)
    elif piece.file.kind == "jsonl":
        yield from _json_texts(piece, config.text_field, problems)
    else:
        yield from _plain_texts(piece, config, problems)


def _row_texts(
    piece: Piece, ends: tuple[int, ...], column: str, problems: list[str]
) -> Iterator[tuple[int, str]]:
    missing = set(piece.missing)
    for number, (begin, end) in enumerate(pairwise((0, *ends))):
        row = piece.first + number
        if number in missing:
            problems.append(f"{piece.file.shown}: row {row}: column {column!r} is null")
            continue
        try:
            yield row, str(piece.data[begin:end], "utf-8")
        except UnicodeDecodeError as error:
            problems.append(
                f"{piece.file.shown}: row {row}: column {column!r} is not UTF-8 "
                f"(byte {error.start} of the text)"
            )


def _json_texts(piece: Piece, field: str, problems: list[str]) -> Iterator[tuple[int, str]]:
    for line, raw in enumerate(bytes(piece.data).removeprefix(_BOM).split(b"\n"), piece.first):
        if not raw or raw.isspace():
            continue
        try:
            yield line, text_of_line(raw, field)
        except UserError as error:
            problems.append(f"{piece.file.shown}:{line + 1}: {error}")


def _plain_texts(
    piece: Piece, config: SourceConfig, problems: list[str]
) -> Iterator[tuple[int, str]]:
    """Yield the documents of a text file; documents that are not UTF-8 become problems."""
    marked = piece.offset == 0 and piece.data[: len(_BOM)] == _BOM
    data = piece.data[len(_BOM) :] if marked else piece.data
    offset = piece.offset + len(piece.data) - len(data)
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError:
        # One invalid byte must not cost all documents of a piece: decode each by itself.
        yield from _decodable_texts(bytes(data), offset, piece, config, problems)
    else:
        yield from _split_documents(text, piece.first, config)


def _decodable_texts(
    data: bytes, offset: int, piece: Piece, config: SourceConfig, problems: list[str]
) -> Iterator[tuple[int, str]]:
    text = data.decode(errors="surrogateescape")
    searched = 0
    for line, document in _split_documents(text, piece.first, config):
        # Surrogates mark the bytes that are not UTF-8.
        if is_encodable(document):
            yield line, document
        else:
            raw = document.encode(errors="surrogateescape")
            # The byte offset of a document is not known otherwise.
            searched = data.index(raw, searched)
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                problems.append(
                    f"{piece.file.shown}: not UTF-8 at byte {offset + searched + error.start}"
                )
            searched += len(raw)


def _split_documents(text: str, line: int, config: SourceConfig) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each document in a text that begins in `line`."""
    if config.document_start is not None:
        yield from _split_at_starts(text, line, re.compile(config.document_start))
    elif config.documents == "file":
        yield line, text
    elif config.documents == "line":
        yield from enumerate((part.rstrip("\r") for part in text.split("\n")), line)
    else:
        leading = _LEADING_BLANK_LINES.match(text)
        begin = leading.end() if leading else 0
        line += text.count("\n", 0, begin)
        for gap in _BLANK_LINES.finditer(text, begin):
            yield line, text[begin : gap.start()].strip("\r\n")
            line += text.count("\n", begin, gap.end())
            begin = gap.end()
        yield line, text[begin:].strip("\r\n")


def _split_at_starts(text: str, line: int, starts: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    first, lines = line, list[str]()
    for number, part in enumerate(text.split("\n"), line):
        if lines and starts.match(part):
            yield first, "\n".join(lines).strip("\r\n")
            first, lines = number, []
        lines.append(part)
    yield first, "\n".join(lines).strip("\r\n")


def draw_held_out(document: Document) -> float:
    """Return a number from 0 to 1 that depends on a document's text only.

    A document is held out if the number is below the held-out fraction.
    """
    # By text, so that equal documents are all held out or all kept.
    return uniform_one(mix_one(text_hash(document.text.strip()) ^ _HELD_OUT_SALT))


def count_copies(document: Document, weight: float) -> int:
    """Return the number of copies of a document: `weight`, rounded up for a share of the
    documents."""
    whole = int(weight)
    if weight == whole:
        return whole
    return whole + (uniform_one(mix_one(document.id ^ _COPY_SALT)) < weight - whole)
