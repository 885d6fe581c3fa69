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
    """Text of one origin, with its share in the data set."""

    paths: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(min_length=1),
        WithJsonSchema(_PATHS_SCHEMA),
    ]
    """Files, folders (every regular file below them that is not hidden) or globs; local or URLs
    such as `s3://bucket/folder` or, of the Hugging Face Hub, `hf://datasets/NAME/folder`.
    Compressed files (.gz, .bz2, .xz, .zst) are read as they are, tar archives (.tar, .tgz, .tar.xz,
    a .xz that holds one) member by member, each as a file of its name would be."""
    name: str | None = None
    """Part of every sample's identity; default: `source-<number>`. Must be unique."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """auto: by the file's ending; what is neither .jsonl, .ndjson, .json nor .parquet is text. An
    HTML page in a file that is not called .html or the like is refused, unless this says text."""
    text_field: str = "text"
    """Field (JSON Lines) or column (Parquet) that holds the text."""
    documents: Literal["file", "line", "paragraph"] = "file"
    """What a document is in a text file: all of it, a line, or what stands between blank lines."""
    document_start: Annotated[str, Field(max_length=1000)] | None = None
    """Text files: a line in which this regular expression matches at the start begins a new
    document. Replaces `documents`."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Times each document appears: whole copies, and the fraction as a share of the documents."""

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
    """The tokenizer: one that exists (`load`), or one trained on the corpus (`train`)."""

    either: ClassVar = (("load",), ("train", "vocab_size", "lowercase", "max_bytes", "sources"))
    only_with: ClassVar = {"lowercase": ("train", "wordpiece")}

    load: Annotated[str, Field(min_length=1)] | None = None
    """Folder (or tokenizer.json file) as transformers saves it, local or URL, or a hub name."""
    train: Literal["wordpiece", "bpe"] | None = None
    """wordpiece: BERT's, with [CLS] and [SEP] around samples; bpe: GPT-2's, on bytes. Trained on
    the corpus without its held-out documents."""
    vocab_size: Annotated[int, Field(ge=300, le=2**24)] = 8192
    """train: number of ids, special tokens included. Short texts may yield fewer."""
    lowercase: bool = False
    """train, wordpiece only: lower-case the text and strip accents."""
    max_bytes: Annotated[int, Field(gt=0, le=2**50)] = 64 * 2**20
    """train: use at most this much text, chosen by hash."""
    sources: tuple[SourceConfig, ...] = ()
    """train: the text to train on. Default: the data set's own; of a mixture that of all its
    sources."""

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
    """How a corpus becomes a data set."""

    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1)]
    """The corpus."""
    tokenizer: TokenizerConfig
    """The tokenizer, loaded or trained."""
    seq_len: Annotated[int, Field(ge=8, le=2**20)]
    """No sample has more tokens, special tokens included."""
    packing: Literal["none", "concat", "best_fit"] = "none"
    """none: a sample is (a part of) one document. concat: documents end to end, cut every seq_len
    tokens. best_fit: documents are cut only where longer than seq_len, then packed best-fit
    decreasing. Boundaries are stored, so that attention can respect them."""
    pairs: bool = False
    """Sentence pairs for next-sentence prediction, half of them random. Needs `packing: none`."""
    min_tokens: Annotated[int, Field(gt=0, le=2**20)] = 1
    """Samples (packed: pieces of documents) with fewer tokens, special ones not counted, are
    dropped."""
    stripe_size: Annotated[int, Field(gt=0, le=2**24)] = 1024
    """Samples per stripe: the unit of reading and shuffling. A smaller corpus is one stripe."""
    stripes_per_shard: Annotated[int, Field(gt=0, le=2**20)] = 64
    """Stripes per file."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Seed of the stored order."""
    held_out: Annotated[float, Field(gt=0, lt=1)] | tuple[SourceConfig, ...] | None = None
    """Evaluation data, a data set of its own in `held_out/`: a fraction of the documents, chosen
    by a hash of their text, so that equal documents stay on one side; or sources."""
    bad_documents: Literal["fail", "skip"] = "fail"
    """fail: name all documents that cannot be read, and stop. skip: leave them out, and count
    them. Pipes, devices and broken links in folders are such documents, and so is, as a whole, a
    file, or member of an archive, that is no text or cannot be read to its end."""
    filters: Annotated[tuple[FilterConfig, ...], Field(max_length=256)] = ()
    """Documents that do not pass one of these are left out, and counted by filter."""
    deduplication: DeduplicationConfig | None = None
    """Documents that are there already are left out, and counted. Default: all are kept."""
    max_document_bytes: Annotated[int, Field(gt=0, le=2**50)] = 64 * 2**20
    """A longer document is an error: every worker holds at least one document in memory."""

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
