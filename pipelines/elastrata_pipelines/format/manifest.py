"""The manifest: the one file that makes a folder of shards a data set. Written last."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format.vocabulary import Vocabulary
from elastrata_pipelines.storage import Storage

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
LENGTHS = "lengths.npy"
"""Lengths of all samples in stored order (stripe after stripe), little-endian int32."""
TOKENIZER_DIR = "tokenizer"
_AGAIN = "prepare the data set again"


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of the data set. `samples` and `stripes` are 0 for files that hold no samples."""

    path: str
    bytes: int
    sha256: str
    samples: int = 0
    stripes: int = 0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that training, `inspect` and a resume need to know before opening a shard."""

    samples: int
    tokens: int
    stripes: int
    stripe_size: int
    """Samples per stripe; the last stripe may be short."""
    seq_len: int
    """No sample is longer."""
    seed: int
    packing: str
    pairs: bool
    """Whether samples are sentence pairs for next-sentence prediction."""
    token_dtype: str
    """NumPy name of the tokens' integer type, little-endian: `uint16` or `uint32`."""
    length_histogram: tuple[int, ...]
    """`length_histogram[s]`: number of samples of length s, for s from 0 to seq_len."""
    vocabulary: Vocabulary
    tokenizer_fingerprint: str
    sources: tuple[dict[str, Any], ...]
    """Per source: name, weight, documents, documents_skipped (by reason; once only a number),
    bytes_read, samples, tokens."""
    files: tuple[FileEntry, ...]
    """Shards in order, then lengths and tokenizer files."""
    preparation: str = ""
    """SHA-256 of the configuration and the source files that the data set was made from."""
    version: int = FORMAT_VERSION
    format: str = "elastrata-shards"

    @property
    def shards(self) -> tuple[FileEntry, ...]:
        """The files that hold samples, in order."""
        return tuple(entry for entry in self.files if entry.stripes)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the manifest's canonical JSON: equal for byte-identical data sets only."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The manifest's text: keys sorted, so that equal manifests are equal to the byte."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    def write(self, storage: Storage) -> None:
        """Makes the folder a data set. All its files must be there."""
        storage.write(self.to_json().encode(), MANIFEST)

    @staticmethod
    def read(storage: Storage) -> Manifest:
        """Reads a data set's manifest.

        Raises:
            UserError: no manifest there, not one of ours, or of another format version.
        """
        try:
            where = storage.uri(MANIFEST)
            data = storage.read(MANIFEST)
        except FileNotFoundError:
            raise UserError(
                f"{storage.uri()}: no data set here ({MANIFEST} is missing); "
                "make one with `elastrata prepare`"
            ) from None
        except Exception as error:  # each kind of store has its own
            raise UserError(f"{storage.url}: no data set can be read there ({error})") from None
        try:
            raw = json.loads(data)
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON ({error}); {_AGAIN}") from None
        if not isinstance(raw, dict) or raw.get("format") != "elastrata-shards":
            raise UserError(f"{where}: not the manifest of an Elastrata data set")
        if raw.get("version") != FORMAT_VERSION:
            raise UserError(
                f"{where}: format version {raw.get('version')}, this Elastrata reads version "
                f"{FORMAT_VERSION}; {_AGAIN}"
            )
        try:
            return _from_json(raw)
        except (TypeError, KeyError) as error:
            raise UserError(f"{where}: damaged manifest ({error}); {_AGAIN}") from None

    def read_lengths(self, storage: Storage) -> npt.NDArray[np.int32]:
        """Lengths of all samples in stored order, shape [samples], int32.

        Raises:
            UserError: the file is missing or does not match the manifest.
        """
        where = storage.uri(LENGTHS)
        try:
            with storage.open(LENGTHS) as stream:
                lengths = np.load(stream, allow_pickle=False)
        except FileNotFoundError:
            raise UserError(f"{where}: missing; {_AGAIN}") from None
        except (ValueError, EOFError) as error:
            raise UserError(f"{where}: unreadable ({error}); {_AGAIN}") from None
        tokens = int(lengths.sum(dtype=np.int64))
        if lengths.shape != (self.samples,) or tokens != self.tokens:
            raise UserError(
                f"{where}: {lengths.size} samples, {tokens} tokens, but the manifest says "
                f"{self.samples} and {self.tokens}: the index does not match; {_AGAIN}"
            )
        return np.asarray(lengths, dtype=np.int32)


def _from_json(raw: dict[str, Any]) -> Manifest:
    vocabulary = raw["vocabulary"]
    ids = {name: tuple(vocabulary[name]) for name in ("special_ids", "continuation_ids")}
    parsed = {
        "length_histogram": tuple(raw["length_histogram"]),
        "vocabulary": Vocabulary(**{**vocabulary, **ids}),
        "sources": tuple(raw["sources"]),
        "files": tuple(FileEntry(**entry) for entry in raw["files"]),
    }
    return Manifest(**{**raw, **parsed})
