"""Origins: finds the documents from which stored samples were made, by sample ids only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.format.manifest import TOKENIZER_DIR
from elastrata_pipelines.hashing import U64, combine, utf8_size
from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.documents import Document, read_documents
from elastrata_pipelines.preparation.portions import portion_bytes, read_portions
from elastrata_pipelines.preparation.provenance import Provenance
from elastrata_pipelines.preparation.sources import SourceFile, find_files
from elastrata_pipelines.preparation.tokenizer import load_tokenizer
from elastrata_pipelines.storage import Storage

_MOST_BYTES = 2**40
_SHOWN_CHARACTERS = 120
# A lower bound on the size of a part bounds the number of ids to try.
_LEAST_TOKENS = 4
"""Minimum number of tokens in a part of a document, except for the last parts."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The place in the text at which a sample begins."""

    source: str
    """Name of the source in the preparation."""
    file: str
    line: int
    """First line of the document, or its row, counted from 1."""
    part: int
    """Number of the document's earlier samples, or parts of packed samples."""
    token: int | None
    """Position of the sample's first token in the document; None if it depends on the tokens
    before."""
    copy: int
    """Number of the document's copy, if its weight is above 1; else 0."""
    text: str
    """Beginning of the document."""


def find_origins(
    storage: Storage, manifest: Manifest, ids: Sequence[int], paths: Mapping[str, Sequence[str]]
) -> dict[int, Origin]:
    """Return the origins of samples, by reading the text until all documents are found.

    Args:
        storage: the data set.
        manifest: its manifest.
        ids: ids of the samples.
        paths: files or folders of the text, by the name of the source.

    Raises:
        UserError: the text is missing, or an earlier version prepared the data set.
    """
    provenance = Provenance.read(storage)
    if provenance is None:
        raise UserError(f"{storage.uri()}: an earlier version prepared it, and kept no origins")
    missing_ids, found = set(ids), dict[int, Origin]()
    # Nothing is tokenised: ids are hashes of source, file, line and part.
    step = _tokens_of_a_part(storage, manifest)
    for number, entry in enumerate(provenance.configuration["sources"]):
        name = entry["name"] or f"source-{number}"
        if name in paths and missing_ids:
            config = SourceConfig.model_validate({**entry, "name": name, "paths": paths[name]})
            for sample_id, origin in _search_source(config, missing_ids, manifest, step):
                found[sample_id] = origin
                missing_ids.discard(sample_id)
                if not missing_ids:
                    break
    return found


def source_names(storage: Storage) -> list[str]:
    """Return the names of the sources from which a data set was prepared.

    Raises:
        UserError: the provenance is damaged.
    """
    provenance = Provenance.read(storage)
    sources = provenance.configuration["sources"] if provenance else ()
    return [source["name"] or f"source-{number}" for number, source in enumerate(sources)]


def _tokens_of_a_part(storage: Storage, manifest: Manifest) -> int | None:
    """Return the number of tokens in all parts of a document but the last; None if it varies."""
    if manifest.pairs or manifest.packing == "concat":
        return None
    frame = load_tokenizer(storage.uri(TOKENIZER_DIR)).frame()
    return manifest.seq_len - frame.num_tokens


def _search_source(
    config: SourceConfig, wanted_ids: set[int], manifest: Manifest, step: int | None
) -> Iterator[tuple[int, Origin]]:
    found = find_files(0, config)
    if found.problems:
        raise UserError(*found.problems)
    for file in found.files:
        for document in _documents(file, config):
            for sample_id, copy, part in _find_samples(document, wanted_ids, config, manifest):
                yield (
                    sample_id,
                    Origin(
                        source=str(config.name),
                        file=document.file,
                        line=document.line + 1,
                        part=part,
                        token=None if step is None else part * step,
                        copy=copy,
                        text=" ".join(document.text[: 2 * _SHOWN_CHARACTERS].split())[
                            :_SHOWN_CHARACTERS
                        ],
                    ),
                )


def _documents(file: SourceFile, config: SourceConfig) -> Iterator[Document]:
    portions = read_portions(
        (file,),
        config,
        size=portion_bytes(file.bytes),
        max_document_bytes=_MOST_BYTES,
        skip=True,
    )
    for portion in portions:
        yield from read_documents(portion, config, max_document_bytes=_MOST_BYTES).documents


def _find_samples(
    document: Document, wanted_ids: set[int], config: SourceConfig, manifest: Manifest
) -> Iterator[tuple[int, int, int]]:
    """Yield id, copy and part of each requested sample of a document."""
    ids = _possible_ids(document, int(np.ceil(config.weight)), manifest)
    for copy, part in np.argwhere(np.isin(ids, np.array(list(wanted_ids), np.uint64))).tolist():
        yield int(ids[copy, part]), copy, part


def _possible_ids(document: Document, copies: int, manifest: Manifest) -> U64:
    """Return the ids that samples of a document may have, shape [copies, parts]."""
    least = _LEAST_TOKENS if manifest.pairs else max(1, manifest.seq_len // 2)
    # A token takes at least one byte, which bounds the number of parts.
    parts = utf8_size(document.text) // least + 2
    copy_ids = combine(np.uint64(document.id), np.arange(copies, dtype=np.uint64))
    return combine(copy_ids[:, None], np.arange(parts, dtype=np.uint64)[None, :])
