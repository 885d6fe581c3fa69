"""The manifest: the one file that makes a folder of shards a data set. Written last."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate, islice
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field, ValidationError
from typing_extensions import override

from elastrata_pipelines.checked_json import Record, parse_json, parse_record, read_bytes, reason
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format.lengths import check_int32, histogram_of, read_int32
from elastrata_pipelines.storage import Storage

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
"""An id; that it is one of the vocabulary is for the manifest to say (`contradictions`)."""
FORMAT: Literal["elastrata-shards"] = "elastrata-shards"
FORMAT_VERSION: Literal[2] = 2
READABLE_VERSIONS = (1, 2)
MANIFEST = "manifest.json"
LENGTHS = "lengths.npy"
"""Lengths of all samples in stored order (stripe after stripe), little-endian int32."""
MOST_LENGTHS_CHECKED = 2**26
"""A quarter of a GiB: a second or two of a run's start."""
TOKENIZER_DIR, SHARDS = "tokenizer", "shards"
BUILDING = ".building"
"""The folder of a preparation's work, deleted at its end."""
AGAIN = "prepare the data set again, with --overwrite"
_CHECKSUM = "checksum"
_CHECKSUM_FIRST = re.compile(rb'\{\n "checksum": "([0-9a-f]{64})",\n')
"""The beginning of the text that `Manifest.to_json` makes."""
_HELD_OUT = "held_out"
_SHOWN_PROBLEMS = 5

Value = TypeVar("Value")
TokenType = Literal["uint16", "uint32"]
"""NumPy name of the tokens' integer type, little-endian."""
Count = Annotated[int, Field(ge=0, lt=2**62)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Vocabulary(Record):
    """The sizes and special ids of the tokenizer a data set was prepared with."""

    size: Annotated[int, Field(ge=1, le=2**32)]
    """Number of ids; every token is below it."""
    pad_id: TokenId
    mask_id: TokenId | None
    """None where the tokenizer has no mask token: such a data set cannot train BERT."""
    special_ids: tuple[TokenId, ...]
    """Ids that are never masked nor used as random replacements (CLS, SEP, PAD, MASK, UNK...)."""
    continuation_ids: tuple[TokenId, ...]
    """Ids that continue the word begun by the token before them (for whole-word masking)."""


def _inside(path: str) -> str:
    parts = path.split("/")
    if not path.isprintable() or not {"", ".", ".."}.isdisjoint(parts) or path == MANIFEST:
        raise ValueError("expected the path of a file inside the data set")
    return path


class FileEntry(Record):
    """One file of the data set. `samples` and `stripes` are 0 for files that hold no samples."""

    path: Annotated[str, AfterValidator(_inside)]
    bytes: Count
    sha256: Sha256
    samples: Count = 0
    stripes: Count = 0


class SourceEntry(Record):
    """Text of one origin, and what became of it."""

    name: str
    weight: Annotated[float, Field(gt=0, le=1000)]
    documents: Count
    documents_skipped: Count | dict[str, Count]
    """By reason; version 1 of the format has their number alone."""
    bytes_read: Count
    samples: Count
    tokens: Count


class Manifest(Record):
    """Everything that training, `inspect` and a resume need to know before opening a shard."""

    samples: Count
    tokens: Count
    stripes: Count
    stripe_size: Annotated[int, Field(ge=1, lt=2**62)]
    """Samples per stripe; the last stripe may be short."""
    seq_len: Annotated[int, Field(ge=1, le=2**24)]
    """No sample is longer."""
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
    """Shards in order, then lengths and tokenizer files."""
    preparation: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the configuration and the source files that the data set was made from."""
    held_out: Sha256 | None = None
    """Fingerprint of the data set that was held out of this one; None: nothing was. Version 1 does
    not say."""
    version: Literal[1, 2] = FORMAT_VERSION
    format: Literal["elastrata-shards"] = FORMAT

    @cached_property
    def shards(self) -> tuple[FileEntry, ...]:
        """The files that hold samples, in order."""
        return tuple(entry for entry in self.files if entry.stripes)

    @cached_property
    def shard_numbers(self) -> Mapping[str, int]:
        """The number of each shard, by its path."""
        return {shard.path: number for number, shard in enumerate(self.shards)}

    @cached_property
    def first_stripes(self) -> tuple[int, ...]:
        """The number of each shard's first stripe, then that of all stripes."""
        return (0, *accumulate(shard.stripes for shard in self.shards))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all that the manifest says: equal for byte-identical data sets only.

        From version 2 on the file holds it too, as `checksum`.
        """
        return hashlib.sha256(_text(self._values()).encode()).hexdigest()

    @override
    def __repr_args__(self) -> Iterator[tuple[str, object]]:
        """The fields that fit a line: histogram and ids may be tens of thousands."""
        for name in ("samples", "tokens", "seq_len", "stripes", "packing", "pairs"):
            yield name, getattr(self, name)
        yield "sources", [source.name for source in self.sources]
        yield "fingerprint", self.fingerprint[:12]

    @override
    def __copy__(self) -> Self:
        """A copy that keeps nothing which was worked out: it may get other fields."""
        copied = super().__copy__()
        for name in vars(self).keys() - type(self).model_fields.keys():
            del vars(copied)[name]
        return copied

    def rows_of(self, stripe: int) -> int:
        """Samples of a stripe."""
        return min(self.stripe_size, self.samples - stripe * self.stripe_size)

    def to_json(self) -> str:
        """The manifest's text: keys sorted, so that equal manifests are equal to the byte."""
        checksum = {_CHECKSUM: self.fingerprint} if self.version > 1 else {}
        return _text(self._values() | checksum)

    def write(self, storage: Storage) -> None:
        """Makes the folder a data set. All its files must be there."""
        storage.write(self.to_json().encode(), MANIFEST)

    @staticmethod
    def read(storage: Storage) -> Manifest:
        """Reads a data set's manifest.

        Raises:
            UserError: no manifest there, not one of ours, of another format version, altered, or
                one that contradicts itself.
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
        """Reads a data set's manifest; None where there is none.

        Raises:
            UserError: as `read`.
        """
        try:
            data = read_bytes(storage, MANIFEST)
        except FileNotFoundError:
            return None
        except UserError as error:
            why = str(error).removeprefix(f"{storage.uri()}/")
            raise UserError(f"{storage.url}: no data set can be read there ({why})") from None
        except Exception as error:  # a URL that no file system knows
            raise UserError(
                f"{storage.url}: no data set can be read there ({reason(error)})"
            ) from None
        return _parsed(data, storage.uri(MANIFEST))

    def read_lengths(self, storage: Storage) -> npt.NDArray[np.int32]:
        """Lengths of all samples in stored order, shape [samples], int32.

        Raises:
            UserError: the file is missing or does not match the manifest.
        """
        lengths = self._index(storage, read_int32)
        if histogram_of(lengths, self.seq_len) != self.length_histogram:
            raise UserError(
                f"{storage.uri(LENGTHS)}: not the lengths that the manifest's histogram counts: "
                f"the index does not match; {AGAIN}"
            )
        return lengths

    def check_lengths(self, storage: Storage) -> None:
        """Looks whether `read_lengths` would read them. Of more than `MOST_LENGTHS_CHECKED` samples
        it reads the file's header alone: a run has the lengths from its shards.

        Raises:
            UserError: as `read_lengths`.
        """
        if self.samples > MOST_LENGTHS_CHECKED:
            self._index(storage, check_int32)
        else:
            self.read_lengths(storage)

    def _index(self, storage: Storage, read: Callable[[Storage, str, int], Value]) -> Value:
        try:
            return read(storage, LENGTHS, self.samples)
        except FileNotFoundError:
            raise UserError(f"{storage.uri(LENGTHS)}: missing; {AGAIN}") from None
        except UserError as error:
            raise UserError(f"{error}; {AGAIN}") from None

    def _values(self) -> dict[str, Any]:
        """All but the checksum, as JSON values."""
        return self.model_dump(exclude={_HELD_OUT} if self.version == 1 else None, mode="json")


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=1, sort_keys=True)


def _parsed(data: bytes, where: str) -> Manifest:
    """The manifest in a text, held against its own checksum and itself."""
    manifest = _as_written(data)
    told = manifest.fingerprint if manifest else None
    if manifest is None:
        manifest, told = _looked_through(data, where)
    problems = list(islice(contradictions(manifest, LENGTHS), _SHOWN_PROBLEMS))
    if manifest.version != 1 and told != manifest.fingerprint and not problems:
        problems = [
            "checksum: missing" if told is None else "altered: its checksum is of something else"
        ]
    if problems:
        raise UserError(*(f"{where}: {problem}; {AGAIN}" for problem in problems))
    return manifest


def _as_written(data: bytes) -> Manifest | None:
    """The manifest in a text that is, to the byte, what its checksum was made of, which takes a
    third of the time: no text is made anew. None: it is altered, of another version, or laid out
    in another way."""
    first = _CHECKSUM_FIRST.match(data)
    if first is None:
        return None
    text = b"{\n" + data[first.end() :]
    told = hashlib.sha256(text).hexdigest()
    if told.encode() != first[1]:
        return None
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError:
        return None
    if manifest.version != FORMAT_VERSION:
        return None
    vars(manifest)["fingerprint"] = told
    return manifest


def _looked_through(data: bytes, where: str) -> tuple[Manifest, Any]:
    """The manifest in any text, and the checksum it tells."""
    raw = parse_json(data, where)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise UserError(f"{where}: not the manifest of an Elastrata data set")
    version = raw.get("version")
    if type(version) is not int or version not in READABLE_VERSIONS:
        raise UserError(
            f"{where}: format version {version!r:.20}, this Elastrata reads versions "
            f"{' and '.join(map(str, READABLE_VERSIONS))}; {AGAIN}"
        )
    told = raw.pop(_CHECKSUM, None) if version != 1 else None
    if version == 1 and _HELD_OUT in raw:
        raise UserError(f"{where}: {_HELD_OUT}: unknown key in version 1; {AGAIN}")
    return parse_record(Manifest, json.dumps(raw), where, AGAIN), told


_UINT16_IDS = 2**16


def contradictions(manifest: Manifest, index: str) -> Iterator[str]:
    """The fields that do not go with others.

    Args:
        manifest: whose fields have the right type and range, each by itself.
        index: the path of the lengths, which must be among the files.
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
    """All stripes but the last one of all are full, in every shard."""
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
"""Where `prepare` puts it."""


def read_held_out(storage: Storage, manifest: Manifest) -> Manifest | None:
    """The manifest of what was held out of a data set; None where nothing was.

    Args:
        storage: the data set.
        manifest: its own. One of version 1 does not say what was held out: it is what is there.

    Raises:
        UserError: it is not what the manifest says: missing, another one, damaged, or not told of.
    """
    folder = storage.sub(HELD_OUT)
    where, beside = folder.uri(MANIFEST), storage.uri(MANIFEST)
    found = Manifest.find(folder)
    told = manifest.held_out
    if manifest.version == 1 or (found and found.fingerprint == told):
        return found
    if found and told:
        problem = f"{where}: not the data that was held out: its checksum is not that in {beside}"
    elif told:
        problem = f"{where}: missing, but {beside} says that data was held out"
    elif found:
        raise UserError(
            f"{where}: {beside} does not say that data was held out; delete this folder, or move "
            "it elsewhere and name it in evaluation.path"
        )
    else:
        return None
    raise UserError(f"{problem}; bring it back, or {AGAIN}")
