"""Detection of files that are not text, by their first bytes."""

from __future__ import annotations

import json
import re
from posixpath import splitext

from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.sources import COMPRESSIONS, SourceFile

# Pointers of large-file storage are smaller.
HEAD_BYTES = 4096
"""Number of bytes of a file that are examined."""
_UNPACK, _CONVERT, _OMIT = "unpack it", "extract its text", "leave it out"
_NO_MARK = "UTF-16 without a byte-order mark, or binary data (control characters)"
_ENCODE = "`iconv -f {0} -t UTF-8 FILE` stores it as that"
# Compare `man 5 magic`.
_KINDS: dict[bytes, tuple[str, str]] = {
    rb"\x1f\x8b": ("gzip data", "end its name in .gz"),
    rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)": ("bzip2 data", "end its name in .bz2"),
    rb"\xfd7zXZ\x00": ("xz data", "end its name in .xz"),
    rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18": ("Zstandard data", "end its name in .zst"),
    rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18": ("LZ4 data", _UNPACK),
    rb"\x1f[\x9d\xa0]|\x5d\x00\x00.{3}\x00|LZIP[\x00-\x02]": ("compressed data", _UNPACK),
    rb"PK(?:\x03\x04|\x05\x06|\x07\x08)": ("a zip archive, or a document or weights", _UNPACK),
    rb"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK),
    rb"Rar!\x1a\x07": ("a RAR archive", _UNPACK),
    rb"!<arch>\n": ("an ar archive", _UNPACK),
    rb"07070[127][0-9A-Fa-f]{70}": ("a cpio archive", _UNPACK),
    rb"MSCF\x00{4}": ("a cabinet archive", _UNPACK),
    rb"%PDF-": ("a PDF", _CONVERT),
    rb"\{\\rtf1": ("RTF", _CONVERT),
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("a document of Microsoft Office", _CONVERT),
    rb"PAR1": ("Parquet", "end its name in .parquet"),
    rb"ARROW1\x00\x00|\xff{4}.{3}\x00|FEA1": ("Arrow data", "store it as Parquet"),
    rb"ORC[\x00-\x1f]|Obj\x01": ("ORC or Avro data", "store it as Parquet"),
    rb"SQLite format 3\x00": ("an SQLite database", "store its text as JSON Lines"),
    rb"(?=.{8}\{[\s\"]).{1,6}\x00\x00": ("weights (safetensors)", _OMIT),
    rb"\x93NUMPY|\x89HDF\r\n|GGUF[\x00-\x1f]": ("arrays or weights", _OMIT),
    rb"\x80[\x02-\x05][\x95}\](c\x8a]": ("a pickle", "store its text as JSON Lines"),
    rb"\x89PNG\r\n|GIF8[79]a|\xff\xd8\xff|II\*\x00|MM\x00\*": ("an image", _OMIT),
    rb"RIFF.{4}(?:WEBP|WAVE|AVI )|OggS\x00|ID3[\x02-\x04]\x00|fLaC\x00|\x00\x00\x00.ftyp": (
        "an image, a recording or a film", _OMIT
    ),
    rb"\x7fELF|MZ\x90\x00|\xca\xfe\xba\xbe|\xcf\xfa\xed\xfe|\x00asm": ("a program", _OMIT),
    rb"\xff\xfe\x00\x00|\x00\x00\xfe\xff": ("UTF-32", _ENCODE.format("UTF-32")),
    rb"\xff\xfe|\xfe\xff": ("UTF-16", _ENCODE.format("UTF-16")),
    # ASCII letters with a zero beside each.
    rb"(?:[\t\n\r -~]\x00){8}": (_NO_MARK, _ENCODE.format("UTF-16LE")),
    rb"(?:\x00[\t\n\r -~]){8}": (_NO_MARK, _ENCODE.format("UTF-16BE")),
}  # fmt: skip
"""Content type and advice, by a regular expression of the first bytes."""
_PROMISED = {
    "gzip": "gzip data", "bz2": "bzip2 data", "xz": "xz data", "zstd": "Zstandard data", None: "",
}  # fmt: skip
_STARTS = [(re.compile(start, re.DOTALL), *words) for start, words in _KINDS.items()]
_LFS = re.compile(rb"version https?://(?:git-lfs|hawser)\.github\.com/spec/v[^\n]*\n(?:.*\n)*?oid ")
_ANNEX = re.compile(rb"(?:/annex/objects/|(?:\.\.[/\\])*\.git[/\\]annex[/\\]objects[/\\])\S+\s")
_FAT = re.compile(rb"#\$# git-fat [0-9a-f]{40}\s")
_PAGE = re.compile(
    rb"(?:\s|<!--(?:(?!-->).)*-->|<\?xml[^>]*>)*"
    rb"<(?:!doctype\s+html\b|(?:html|head|body)[\s>]|Error>\s*<Code>)",
    re.IGNORECASE | re.DOTALL,
)
"""Beginning of an HTML page, or of an error message of S3."""
_BOM = b"\xef\xbb\xbf"
_ENDINGS_OF_MARKUP = (
    ".html", ".htm", ".xhtml", ".shtml", ".mhtml", ".xml", ".xsl", ".xslt", ".svg", ".php",
    ".phtml", ".asp", ".aspx", ".cshtml", ".jsp", ".jspx", ".erb", ".ejs", ".hbs", ".mustache",
    ".j2", ".jinja", ".jinja2", ".njk", ".liquid", ".twig", ".tmpl", ".tpl", ".ftl", ".vue",
    ".svelte", ".astro", ".cfm", ".heex", ".eex",
)  # fmt: skip
"""Endings of files that are expected to contain pages."""
# Without spaces, line ends, backspace, and the escape character of terminal colours.
_CONTROL = "\0-\x07\x0e-\x1a\x1c-\x1f\x7f"
_CONTROL_LETTER = re.compile(f"[{_CONTROL}]")
_CONTROL_BYTE = re.compile(f"[{_CONTROL}]".encode())
_MOST_CONTROL = 0.05


def refuse_no_text(file: SourceFile, head: bytes, config: SourceConfig) -> None:
    """Check the first `HEAD_BYTES` of an uncompressed text or JSON Lines file.

    Raises:
        OSError: the file is not text; the message names its type, and what to do.
    """
    if found := _kind(head):
        raise OSError("{}, expected UTF-8 text; {}".format(*found))
    if len(head) < HEAD_BYTES and (found := _pointer(head)):
        raise OSError("a pointer of {}, not the file itself; {}".format(*found))
    if config.format != "text" and _is_page(file, head):
        raise OSError(
            "an HTML page (of an error?), expected text; to train on HTML end its name in .html "
            "or set format: text"
        )
    if file.kind == "jsonl" and (found := _whole_json(head.removeprefix(_BOM).lstrip())):
        raise OSError("{}, expected JSON Lines, an object in each line; {}".format(*found))
    if file.kind == "text" and _exceeds_control_share(len(_CONTROL_BYTE.findall(head)), len(head)):
        raise OSError("binary data (control characters), expected text; leave it out")


def refuse_not_packed(file: SourceFile, head: bytes, config: SourceConfig) -> None:
    """Check the first bytes of a file whose name promises compression.

    Raises:
        OSError: the file is something else, such as a pointer or a page.
    """
    found = _kind(head)
    if found is None or found[0] != _PROMISED.get(file.compression):
        refuse_no_text(file, head, config)


def is_binary(text: str) -> bool:
    """Return whether a text is binary data in UTF-8: more than 5% of it are control characters."""
    # A search that finds nothing is much faster than a list of all matches.
    if not _CONTROL_LETTER.search(text):
        return False
    return _exceeds_control_share(len(_CONTROL_LETTER.findall(text)), len(text))


def _exceeds_control_share(control: int, size: int) -> bool:
    return control > 1 + _MOST_CONTROL * size


def _kind(head: bytes) -> tuple[str, str] | None:
    return next(((what, advice) for start, what, advice in _STARTS if start.match(head)), None)


def _pointer(head: bytes) -> tuple[str, str] | None:
    if _LFS.match(head):
        return "Git LFS", "fetch it with `git lfs pull`"
    if _ANNEX.match(head + b"\n"):
        return "git-annex", "fetch it with `git annex get`"
    if _FAT.match(head + b"\n"):
        return "git-fat", "fetch it with `git fat pull`"
    return None


def _whole_json(head: bytes) -> tuple[str, str] | None:
    """Return what a JSON file is and how to convert it, if it is no JSON Lines."""
    line, _, more = head.partition(b"\n")
    if line.rstrip() == b"{":
        return "a JSON object over several lines", "`jq -c . FILE` makes it one"
    if not line.startswith(b"["):
        return None
    try:
        json.loads(line)
    except ValueError:
        is_line = False
    else:
        # A first line that is wrong among others is a bad document.
        is_line = bool(more.strip())
    return None if is_line else ("a JSON array", "`jq -c '.[]' FILE` makes them")


def _is_page(file: SourceFile, head: bytes) -> bool:
    """Return whether a file contains a page although its name promises something else."""
    stem, ending = splitext(file.url.lower())
    ending = splitext(stem)[1] if ending in COMPRESSIONS else ending
    return ending not in _ENDINGS_OF_MARKUP and bool(_PAGE.match(head.removeprefix(_BOM)))
