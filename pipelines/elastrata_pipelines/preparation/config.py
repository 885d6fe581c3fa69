"""Configuration of `prepare`: the text, the tokenizer, and the conversion to samples."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from elastrata_pipelines.configured_text import ConfigPart
from elastrata_pipelines.errors import suggest_nearest
from elastrata_pipelines.preparation.deduplication import DeduplicationConfig
from elastrata_pipelines.preparation.filters import FilterConfig

_PATHS_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
    ]
}
"""JSON schema that accepts a single path without a list."""


class SourceConfig(ConfigPart):
    """A source of text and its weight in the data set."""

    paths: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(min_length=1),
        WithJsonSchema(_PATHS_SCHEMA),
    ]
    """Files, folders (all regular files below them) or globs: local, URLs such as
    `s3://bucket/folder`, or `hf://datasets/NAME/folder` (Hugging Face Hub). In folders and globs,
    files beside the data are passed over and counted: hidden ones, names that begin with `_` as in
    Spark (but Python's sources), .crc, and the hub's README.md, config.json, dataset_infos.json and
    the like. Compressed files (.gz, .bz2, .xz, .zst) are decompressed; members of tar archives
    (.tar, .tgz, .tar.xz, a .xz that holds one) are read like files of their names."""
    name: str | None = None
    """Unique name, a part of every sample's identity. Default: `source-<number>`."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """File format. auto: by the extension (.jsonl, .ndjson, .json, .parquet; others are text). HTML
    pages without an HTML extension are refused unless this is text."""
    text_field: str = "text"
    """Field (JSON Lines) or column (Parquet) that contains the text; `a.b` is the field b in a."""
    documents: Literal["file", "line", "paragraph"] = "file"
    """Documents of a text file: the whole file, its lines, or paragraphs between blank lines."""
    document_start: Annotated[str, Field(max_length=1000)] | None = None
    """Text files: regular expression, matched at the start of lines, for lines that begin a
    document. Replaces `documents`."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Copies of each document; the fraction is the share of documents with one more copy."""

    @field_validator("paths", mode="before")
    @classmethod
    def _one_path(cls, value: object) -> object:
        return (str(value),) if isinstance(value, str | Path) else value

    @field_validator("document_start")
    @classmethod
    def _check_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return value


class TokenizerConfig(ConfigPart):
    """The tokenizer: an existing one (`load`), or one trained on the corpus (`train`)."""

    either: ClassVar = (("load",), ("train", "vocab_size", "lowercase", "max_bytes", "sources"))
    only_with: ClassVar = {"lowercase": ("train", "wordpiece")}

    load: Annotated[str, Field(min_length=1)] | None = None
    """Folder or tokenizer.json of a transformers tokenizer, local or URL, or its name in the
    hub."""
    train: Literal["wordpiece", "bpe"] | None = None
    """Kind of tokenizer to train on the corpus, except held-out documents. wordpiece: BERT's, with
    [CLS] and [SEP] around samples. bpe: GPT-2's, on bytes."""
    vocab_size: Annotated[int, Field(ge=300, le=2**24)] = 8192
    """train: number of ids, special tokens included. Short texts may yield fewer."""
    lowercase: bool = False
    """train, wordpiece only: whether to lower-case the text and strip accents."""
    max_bytes: Annotated[int, Field(gt=0, le=2**50)] = 64 * 2**20
    """train: maximum bytes of text to train on, chosen by hash."""
    sources: tuple[SourceConfig, ...] = ()
    """train: text to train on. Default: the data set's sources; in a mixture, those of all data
    sets."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.load is None) == (self.train is None):
            raise ValueError("needs either load (a folder or name) or train (wordpiece or bpe)")
        # A stored recipe contains every key, including those that were not set.
        defaults = {key: field.default for key, field in type(self).model_fields.items()}
        given = {key for key in self.model_fields_set if getattr(self, key) != defaults[key]}
        given -= {"load", "train"}
        if self.load is not None and given:
            raise ValueError(f"{', '.join(sorted(given))}: only with train")
        if self.lowercase and self.train == "bpe":
            raise ValueError("lowercase: only with train: wordpiece")
        return self


class PrepareConfig(ConfigPart):
    """Preparation of a data set from a corpus."""

    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1)]
    """Sources of the corpus."""
    tokenizer: TokenizerConfig
    """Tokenizer, loaded or trained."""
    seq_len: Annotated[int, Field(ge=8, le=2**20)]
    """Maximum tokens per sample, special tokens included."""
    packing: Literal["none", "concat", "best_fit"] = "none"
    """none: a sample is (a part of) one document. concat: concatenate documents and cut every
    seq_len tokens. best_fit: cut only documents longer than seq_len, then pack best-fit decreasing.
    Stored boundaries let attention respect documents."""
    pairs: bool = False
    """Whether to make sentence pairs for next-sentence prediction, half of them random. Needs
    `packing: none`."""
    min_tokens: Annotated[int, Field(gt=0, le=2**20)] = 1
    """Minimum tokens of a sample (packed: of a piece of a document), without special ones. Shorter
    ones are dropped."""
    stripe_size: Annotated[int, Field(gt=0, le=2**24)] = 1024
    """Samples per stripe, the unit of reading and shuffling. A smaller corpus is one stripe."""
    stripes_per_shard: Annotated[int, Field(gt=0, le=2**20)] = 64
    """Stripes per file."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Seed of the stored order."""
    held_out: Annotated[float, Field(gt=0, lt=1)] | tuple[SourceConfig, ...] | None = None
    """Evaluation data, a separate data set in `held_out/`: sources, or a share of the documents,
    chosen by a hash of their text so that equal documents stay together."""
    bad_documents: Literal["fail", "skip"] = "fail"
    """Action on unreadable documents. fail: name all and stop. skip: leave out and count. Pipes,
    devices and broken links in folders are unreadable, too; a file or archive member that is not
    text or cannot be read to its end counts as one unreadable document."""
    filters: Annotated[tuple[FilterConfig, ...], Field(max_length=256)] = ()
    """Filters that every document must pass. Rejected documents are counted by filter."""
    deduplication: DeduplicationConfig | None = None
    """Removal of duplicate documents, which are counted. Default: keep all."""
    max_document_bytes: Annotated[int, Field(gt=0, le=2**50)] = 64 * 2**20
    """Maximum bytes of a document; larger ones are errors, because workers hold whole documents in
    memory."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.pairs and self.packing != "none":
            raise ValueError(f"pairs: needs packing: none, not {self.packing}")
        if self.held_out == ():
            raise ValueError("held_out: an empty list; leave it out or name sources")
        # Names are part of sample ids.
        names = Counter(source.name for source in self.all_sources)
        for name in (name for name, count in names.items() if count > 1):
            raise ValueError(f"sources: two have the name {name!r}")
        for number, filter in enumerate(self.filters):
            for name in filter.sources:
                if name not in names:
                    raise ValueError(
                        f"filters.{number}.sources: {name}: expected one of "
                        f"{', '.join(map(str, names))}{suggest_nearest(name, map(str, names))}"
                    )
        return self

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """All sources with names, the held-out ones last."""
        held_out = self.held_out if isinstance(self.held_out, tuple) else ()
        return tuple(
            source if source.name else source.model_copy(update={"name": f"source-{number}"})
            for number, source in enumerate((*self.sources, *held_out))
        )

    @property
    def held_out_fraction(self) -> float:
        """Fraction that is held out by hash, or 0."""
        return self.held_out if isinstance(self.held_out, float) else 0.0
