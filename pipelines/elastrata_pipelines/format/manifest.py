"""The manifest: the file that makes a folder of shards a data set. It is written last."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field, ValidationError
from typing_extensions import override

from elastrata_pipelines.checked_json import (
    Record,
    describe_error,
    parse_json,
    parse_record,
    read_bytes,
)
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format.lengths import check_int32, histogram_of, read_int32
from elastrata_pipelines.storage import Storage

# The range of one field only; `contradictions` checks ids against the vocabulary.
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
"""A token id."""
FORMAT: Literal["elastrata-shards"] = "elastrata-shards"
FORMAT_VERSION: Literal[2] = 2
# Version 1 has neither `checksum` nor `held_out`.
READABLE_VERSIONS = (1, 2)
MANIFEST = "manifest.json"
LENGTHS = "lengths.npy"
"""File with the lengths of all samples in stored order (stripe after stripe), little-endian
int32."""
# A quarter of a GiB, which takes a second or two when a run starts.
MOST_LENGTHS_CHECKED = 2**26
"""Maximum number of samples whose lengths a run checks."""
TOKENIZER_DIR, SHARDS = "tokenizer", "shards"
BUILDING = ".building"
"""Folder with the intermediate files of a preparation, deleted at its end."""
PREPARE_AGAIN_ADVICE = "prepare the data set again, with --overwrite"
_CHECKSUM = "checksum"
_CHECKSUM_FIRST = re.compile(rb'\{\n "checksum": "([0-9a-f]{64})",\n')
"""Beginning of the text that `Manifest.to_json` produces."""
_HELD_OUT = "held_out"
_SHOWN_PROBLEMS = 5

Value = TypeVar("Value")
TokenType = Literal["uint16", "uint32"]
"""NumPy name of the tokens' little-endian integer type."""
Count = Annotated[int, Field(ge=0, lt=2**62)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Vocabulary(Record):
    """Size and special ids of the tokenizer that prepared a data set."""

    size: Annotated[int, Field(ge=1, le=2**32)]
    """Number of ids; every token is below it."""
    pad_id: TokenId
    mask_id: TokenId | None
    """Mask token; None if the tokenizer has none, in which case the data set cannot train BERT."""
    special_ids: tuple[TokenId, ...]
    """Ids that are never masked or used as random replacements (CLS, SEP, PAD, MASK, UNK...)."""
    continuation_ids: tuple[TokenId, ...]
    """Ids that continue the word of the preceding token (for whole-word masking)."""


def _check_path(path: str) -> str:
    parts = path.split("/")
    # A manifest from elsewhere must not name files outside its folder.
    if not path.isprintable() or not {"", ".", ".."}.isdisjoint(parts) or path == MANIFEST:
        raise ValueError("expected the path of a file inside the data set")
    return path


class FileEntry(Record):
    """One file of the data set. `samples` and `stripes` are 0 for files without samples."""

    path: Annotated[str, AfterValidator(_check_path)]
    bytes: Count
    sha256: Sha256
    samples: Count = 0
    stripes: Count = 0


class SourceEntry(Record):
    """One source of text, and the number of documents, samples and tokens that came from it."""

    name: str
    weight: Annotated[float, Field(gt=0, le=1000)]
    documents: Count
    documents_skipped: Count | dict[str, Count]
    """Skipped documents by reason; version 1 of the format has only their total."""
    bytes_read: Count
    samples: Count
    tokens: Count


class Manifest(Record):
    """Metadata of a data set: all that training, `inspect` and a resume need before opening a
    shard."""

    samples: Count
    tokens: Count
    stripes: Count
    stripe_size: Annotated[int, Field(ge=1, lt=2**62)]
    """Samples per stripe; the last stripe may be short."""
    seq_len: Annotated[int, Field(ge=1, le=2**24)]
    """Maximum length of a sample, in tokens."""
    seed: int
    packing: Literal["none", "concat", "best_fit"]
    pairs: bool
    """Whether samples are sentence pairs for next-sentence prediction."""
    token_dtype: TokenType
    length_histogram: tuple[Count, ...]
    """`length_histogram[s]`: number of samples of length s, for s from 0 to seq_len."""
    vocabulary: Vocabulary
    tokenizer_fingerprint: Annotated[str, Field(pattern="^[ -~]{0,128}$")]
    sources: tuple[SourceEntry, ...]
    files: tuple[FileEntry, ...]
    """Shards in order, followed by lengths and tokenizer files."""
    preparation: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the configuration and source files from which the data set was made."""
    held_out: Sha256 | None = None
    """Fingerprint of the held-out data set; None if nothing was held out. Version 1 does not
    record this."""
    version: Literal[1, 2] = FORMAT_VERSION
    format: Literal["elastrata-shards"] = FORMAT

    @cached_property
    def shards(self) -> tuple[FileEntry, ...]:
        """Files that hold samples, in order."""
        return tuple(entry for entry in self.files if entry.stripes)

    @cached_property
    def shard_numbers(self) -> Mapping[str, int]:
        """Number of each shard, by its path."""
        return {shard.path: number for number, shard in enumerate(self.shards)}

    @cached_property
    def first_stripes(self) -> tuple[int, ...]:
        """Number of each shard's first stripe, followed by the total number of stripes."""
        return (0, *accumulate(shard.stripes for shard in self.shards))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the manifest's content, equal only for byte-identical data sets.

        From version 2 on the file also holds it, as `checksum`.
        """
        return hashlib.sha256(_text(self._values()).encode()).hexdigest()

    @override
    def __repr_args__(self) -> Iterator[tuple[str, object]]:
        """Yield the fields that fit one line."""
        # The histogram and the special ids may have tens of thousands of entries.
        for name in ("samples", "tokens", "seq_len", "stripes", "packing", "pairs"):
            yield name, getattr(self, name)
        yield "sources", [source.name for source in self.sources]
        yield "fingerprint", self.fingerprint[:12]

    @override
    def __copy__(self) -> Self:
        """Return a copy without cached properties."""
        # `model_copy` calls this and then changes fields, which would make cached values wrong.
        copied = super().__copy__()
        for name in vars(self).keys() - type(self).model_fields.keys():
            del vars(copied)[name]
        return copied

    def rows_of(self, stripe: int) -> int:
        """Return the number of samples in a stripe."""
        return min(self.stripe_size, self.samples - stripe * self.stripe_size)

    def to_json(self) -> str:
        """Return the manifest as JSON with sorted keys, so that equal manifests have equal
        bytes."""
        checksum = {_CHECKSUM: self.fingerprint} if self.version > 1 else {}
        return _text(self._values() | checksum)

    def write(self, storage: Storage) -> None:
        """Write the manifest, which makes the folder a data set. All other files must exist
        already."""
        storage.write(self.to_json().encode(), MANIFEST)

    @staticmethod
    def read(storage: Storage) -> Manifest:
        """Read the manifest of a data set.

        Raises:
            UserError: the manifest is missing, foreign, of another format version, altered, or
                contradicts itself.
        """
        found = Manifest.find(storage)
        if found is None:
            raise UserError(
                f"{storage.uri()}: no data set here ({MANIFEST} is missing); "
                "make one with `elastrata prepare`"
            )
        return found

    @staticmethod
    def find(storage: Storage) -> Manifest | None:
        """Read the manifest of a data set; return None if it does not exist.

        Raises:
            UserError: see `read`.
        """
        try:
            data = read_bytes(storage, MANIFEST)
        except FileNotFoundError:
            folder = Path(storage.path())
            if not storage.is_local or not folder.is_symlink() or folder.exists():
                return None
            why = "a link to something that is not there"
            raise UserError(f"{storage.url}: no data set can be read there ({why})") from None
        except UserError as error:
            why = str(error).removeprefix(f"{storage.uri()}/")
            raise UserError(f"{storage.url}: no data set can be read there ({why})") from None
        # The URL's scheme has no file system, for example.
        except Exception as error:
            raise UserError(
                f"{storage.url}: no data set can be read there ({describe_error(error)})"
            ) from None
        return _parse(data, storage.uri(MANIFEST))

    def read_lengths(self, storage: Storage) -> npt.NDArray[np.int32]:
        """Return the lengths of all samples in stored order, shape [samples], int32.

        Raises:
            UserError: the file is missing or does not match the manifest.
        """
        lengths = self._index(storage, read_int32)
        if histogram_of(lengths, self.seq_len) != self.length_histogram:
            raise UserError(
                f"{storage.uri(LENGTHS)}: not the lengths that the manifest's histogram counts: "
                f"the index does not match; {PREPARE_AGAIN_ADVICE}"
            )
        return lengths

    def check_lengths(self, storage: Storage) -> None:
        """Check that `read_lengths` would succeed.

        Raises:
            UserError: see `read_lengths`.
        """
        # Of larger files only the header is checked: training reads lengths from the shards.
        if self.samples > MOST_LENGTHS_CHECKED:
            self._index(storage, check_int32)
        else:
            self.read_lengths(storage)

    def _index(self, storage: Storage, read: Callable[[Storage, str, int], Value]) -> Value:
        try:
            return read(storage, LENGTHS, self.samples)
        except FileNotFoundError:
            raise UserError(f"{storage.uri(LENGTHS)}: missing; {PREPARE_AGAIN_ADVICE}") from None
        except UserError as error:
            raise UserError(f"{error}; {PREPARE_AGAIN_ADVICE}") from None

    def _values(self) -> dict[str, Any]:
        """Return all fields but the checksum as JSON values."""
        # Version 1 did not have the field, and must keep its fingerprints.
        return self.model_dump(exclude={_HELD_OUT} if self.version == 1 else None, mode="json")


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=1, sort_keys=True)


def _parse(data: bytes, where: str) -> Manifest:
    """Parse a manifest, and check its checksum and consistency."""
    manifest = _parse_unchanged(data)
    stated_checksum = manifest.fingerprint if manifest else None
    if manifest is None:
        manifest, stated_checksum = _parse_any(data, where)
    problems = list(islice(find_contradictions(manifest, LENGTHS), _SHOWN_PROBLEMS))
    if manifest.version != 1 and stated_checksum != manifest.fingerprint and not problems:
        problems = [
            "checksum: missing"
            if stated_checksum is None
            else "altered: its checksum is of something else"
        ]
    if problems:
        raise UserError(*(f"{where}: {problem}; {PREPARE_AGAIN_ADVICE}" for problem in problems))
    return manifest


def _parse_unchanged(data: bytes) -> Manifest | None:
    """Parse a manifest whose text is byte for byte the one that its checksum was computed from.

    Return None if the text was altered, is of another version, or has another layout.
    """
    # Takes a third of the time of `_parse_any`, since the text need not be serialised again.
    first = _CHECKSUM_FIRST.match(data)
    if first is None:
        return None
    text = b"{\n" + data[first.end() :]
    checksum = hashlib.sha256(text).hexdigest()
    if checksum.encode() != first[1]:
        return None
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError:
        return None
    if manifest.version != FORMAT_VERSION:
        return None
    # Fills the cached property without serialising the manifest.
    vars(manifest)["fingerprint"] = checksum
    return manifest


def _parse_any(data: bytes, where: str) -> tuple[Manifest, Any]:
    """Parse a manifest of any layout. Return it with the checksum that it states."""
    raw = parse_json(data, where)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise UserError(f"{where}: not the manifest of an Elastrata data set")
    version = raw.get("version")
    # `True` and `1.0` are equal to 1, but not versions.
    if type(version) is not int or version not in READABLE_VERSIONS:
        raise UserError(
            f"{where}: format version {version!r:.20}, this Elastrata reads versions "
            f"{' and '.join(map(str, READABLE_VERSIONS))}; {PREPARE_AGAIN_ADVICE}"
        )
    stated_checksum = raw.pop(_CHECKSUM, None) if version != 1 else None
    if version == 1 and _HELD_OUT in raw:
        raise UserError(f"{where}: {_HELD_OUT}: unknown key in version 1; {PREPARE_AGAIN_ADVICE}")
    return parse_record(Manifest, json.dumps(raw), where, PREPARE_AGAIN_ADVICE), stated_checksum


_UINT16_IDS = 2**16


def find_contradictions(manifest: Manifest, index: str) -> Iterator[str]:
    """Yield one line for each field that contradicts another one.

    Args:
        manifest: a manifest whose fields are each of the right type and range.
        index: path of the lengths file, which must be listed.
    """
    yield from _histogram_problems(manifest)
    yield from _file_problems(manifest, index)
    yield from _shard_problems(manifest)
    yield from _vocabulary_problems(manifest.vocabulary)
    if manifest.token_dtype == "uint16" and manifest.vocabulary.size > _UINT16_IDS:
        yield f"token_dtype: uint16: too small for the vocabulary's {manifest.vocabulary.size} ids"
    if manifest.pairs and manifest.packing != "none":
        yield f"packing: {manifest.packing}: expected none, for samples are pairs"


def _histogram_problems(manifest: Manifest) -> Iterator[str]:
    histogram = manifest.length_histogram
    samples = sum(histogram)
    tokens = sum(length * count for length, count in enumerate(histogram))
    if len(histogram) != manifest.seq_len + 1:
        yield f"length_histogram: {len(histogram)} numbers, expected {manifest.seq_len + 1}"
    if histogram[:1] != (0,):
        yield "length_histogram.0: expected 0: no sample is empty"
    if not samples:
        yield "length_histogram: expected at least one sample"
    if samples != manifest.samples:
        yield f"samples: {manifest.samples}: the length histogram counts {samples}"
    if tokens != manifest.tokens:
        yield f"tokens: {manifest.tokens}: the length histogram counts {tokens}"


def _file_problems(manifest: Manifest, index: str) -> Iterator[str]:
    seen = set[str]()
    for entry in manifest.files:
        if entry.path in seen:
            yield f"files: {entry.path}: listed twice"
        if bool(entry.samples) != bool(entry.stripes):
            yield f"files: {entry.path}: {entry.samples} samples in {entry.stripes} stripes"
        seen.add(entry.path)
    if index not in seen:
        yield f"files: {index}: missing"


def _shard_problems(manifest: Manifest) -> Iterator[str]:
    """Yield the problems of shards. All stripes are full, except the last stripe of the last
    shard."""
    held, stripes = 0, sum(shard.stripes for shard in manifest.shards)
    for shard in manifest.shards:
        expected = min(shard.stripes * manifest.stripe_size, manifest.samples - held)
        if shard.samples != expected:
            yield f"files: {shard.path}: {shard.samples} samples, expected {expected}"
        held += shard.samples
    if held != manifest.samples:
        yield f"samples: {manifest.samples}, but the shards hold {held}"
    if stripes != manifest.stripes:
        yield f"stripes: {manifest.stripes}, but the shards hold {stripes}"
    if manifest.stripes != (expected := -(-manifest.samples // manifest.stripe_size)):
        yield f"stripes: {manifest.stripes}, expected {expected} of {manifest.stripe_size} samples"


def _vocabulary_problems(vocabulary: Vocabulary) -> Iterator[str]:
    masks = () if vocabulary.mask_id is None else (vocabulary.mask_id,)
    for field, ids in (
        ("pad_id", (vocabulary.pad_id,)),
        ("mask_id", masks),
        ("special_ids", vocabulary.special_ids),
        ("continuation_ids", vocabulary.continuation_ids),
    ):
        if ids and (largest := max(ids)) >= vocabulary.size:
            yield f"vocabulary.{field}: {largest}: expected ids below {vocabulary.size}, its size"


HELD_OUT = "held_out"
"""Folder of the held-out data set, below the data set."""


def read_held_out(storage: Storage, manifest: Manifest) -> Manifest | None:
    """Return the manifest of the data that was held out of a data set; None if nothing was.

    Args:
        storage: the data set.
        manifest: its manifest. Version 1 does not record held-out data, so whatever exists is
            returned.

    Raises:
        UserError: the held-out data is missing, damaged, another data set, or not recorded in the
            manifest.
    """
    folder = storage.sub(HELD_OUT)
    where, parent = folder.uri(MANIFEST), storage.uri(MANIFEST)
    found = Manifest.find(folder)
    expected_fingerprint = manifest.held_out
    if manifest.version == 1 or (found and found.fingerprint == expected_fingerprint):
        return found
    if found and expected_fingerprint:
        problem = f"{where}: not the data that was held out: its checksum is not that in {parent}"
    elif expected_fingerprint:
        problem = f"{where}: missing, but {parent} says that data was held out"
    elif found:
        raise UserError(
            f"{where}: {parent} does not say that data was held out; delete this folder, or move "
            "it elsewhere and name it in evaluation.path"
        )
    else:
        return None
    raise UserError(f"{problem}; bring it back, or {PREPARE_AGAIN_ADVICE}")
