"""Documents: the texts in a portion, each with an identity that moving a corpus leaves alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.hashing import combine_one, mix_one, text_hash, uniform_one, utf8_size
from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.not_text import is_binary
from elastrata_pipelines.preparation.pieces import Piece, too_long
from elastrata_pipelines.preparation.portions import Portion
from elastrata_pipelines.preparation.tables import encodes, text_of_line

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
    """Its first one, or its row, counted from 0."""
    file: str = ""
    """Where it is, as a line can hold it."""


@dataclass(frozen=True)
class Documents:
    """The documents of a portion, in order; blank ones are left out."""

    documents: list[Document]
    problems: list[str]
    """One line per document that could not be read."""
    fatal: tuple[str, ...]
    """One line per file, or overlong document, that could not be read to its end."""


def read_documents(portion: Portion, config: SourceConfig, *, max_document_bytes: int) -> Documents:
    """Decodes and parses a portion of a source."""
    documents: list[Document] = []
    problems: list[str] = []
    fatal = list(portion.problems)
    for piece in portion.pieces:
        name = piece.file.name.encode(errors="surrogateescape")  # names need not be UTF-8
        identity = text_hash(config.name or "", name)
        for line, text in _texts(piece, config, problems):
            if len(text) * 4 > max_document_bytes and utf8_size(text) > max_document_bytes:
                fatal.append(too_long(piece.file, line, max_document_bytes))
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
    """Line (or row) and text of each document of a piece."""
    if piece.ends is not None:
        yield from _row_texts(piece, piece.ends, config.text_field, problems)
    elif piece.file.kind == "jsonl":
        yield from _json_texts(piece, config.text_field, problems)
    else:
        yield from _readable(piece, config, problems)


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


def _readable(piece: Piece, config: SourceConfig, problems: list[str]) -> Iterator[tuple[int, str]]:
    """The documents of a text file; those that are not UTF-8 become problems."""
    marked = piece.offset == 0 and piece.data[: len(_BOM)] == _BOM
    data = piece.data[len(_BOM) :] if marked else piece.data
    offset = piece.offset + len(piece.data) - len(data)
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError:
        yield from _readable_parts(bytes(data), offset, piece, config, problems)
    else:
        yield from _split(text, piece.first, config)


def _readable_parts(
    data: bytes, offset: int, piece: Piece, config: SourceConfig, problems: list[str]
) -> Iterator[tuple[int, str]]:
    text = data.decode(errors="surrogateescape")
    searched = 0
    for line, document in _split(text, piece.first, config):
        if encodes(document):
            yield line, document
        else:
            raw = document.encode(errors="surrogateescape")
            searched = data.index(raw, searched)
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                problems.append(
                    f"{piece.file.shown}: not UTF-8 at byte {offset + searched + error.start}"
                )
            searched += len(raw)


def _split(text: str, line: int, config: SourceConfig) -> Iterator[tuple[int, str]]:
    """Line and text of each document in whole documents' text that begins in `line`."""
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


def held_out_draw(document: Document) -> float:
    """A number from 0 to 1 drawn by a document's text alone: below the fraction that is held out,
    the document is."""
    return uniform_one(mix_one(text_hash(document.text.strip()) ^ _HELD_OUT_SALT))


def copies(document: Document, weight: float) -> int:
    """How often a document appears: `weight` rounded up for a share of the documents, else down."""
    whole = int(weight)
    if weight == whole:
        return whole
    return whole + (uniform_one(mix_one(document.id ^ _COPY_SALT)) < weight - whole)
