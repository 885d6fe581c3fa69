"""`prepare`: makes a data set from text."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.errors import UserError, pluralize
from elastrata_pipelines.format import HELD_OUT as HELD_OUT_FOLDER
from elastrata_pipelines.format import FileEntry, Manifest, SourceEntry, write_file
from elastrata_pipelines.format.manifest import LENGTHS, TOKENIZER_DIR
from elastrata_pipelines.preparation.config import PrepareConfig
from elastrata_pipelines.preparation.corpus import Corpus, Progress, token_dtype
from elastrata_pipelines.preparation.filters import check_filters
from elastrata_pipelines.preparation.pipeline import run_in_parallel
from elastrata_pipelines.preparation.provenance import (
    PROVENANCE,
    Provenance,
    find_empty_sources,
    sum_counts,
)
from elastrata_pipelines.preparation.screening import HELD_OUT, TRAINING
from elastrata_pipelines.preparation.shards import Plan, WriteShard, plan_shards
from elastrata_pipelines.preparation.target import Target, keep_tokenizer, load_kept_tokenizer
from elastrata_pipelines.preparation.tokenizer import TokenizerFiles, load_tokenizer
from elastrata_pipelines.preparation.work import TokenizedPortion
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True)
class Layout:
    """Content of the manifest, except for the files."""

    plan: Plan
    unknown_tokens: dict[str, int]
    """Number of unknown tokens, by source name."""
    sources: tuple[SourceEntry, ...]


def lay_out(config: PrepareConfig, tokenized: Sequence[TokenizedPortion], part: int) -> Layout:
    """Assign a place to each sample of the training or held-out part.

    Raises:
        UserError: no samples are left, in total or for one of the sources.
    """
    if barren := list(find_empty_sources(config, tokenized)):
        raise UserError(*barren)
    runs = [run for portion in tokenized if (run := portion.runs[part]) is not None]
    documents = sum(portion.documents[part] for portion in tokenized)
    if not runs:
        # With one document, `fraction_for_one` cannot hold out anything.
        if part == HELD_OUT and config.held_out_fraction and not documents:
            raise UserError(
                "held_out: of a single document nothing can be held out; give more, make documents "
                "of its parts (documents: paragraph, or line), or hold out nothing (--held-out 0)"
            )
        where = "held_out" if part == HELD_OUT else "sources"
        raise UserError(
            f"{where}: nothing is left: {pluralize(documents, 'document')}, no sample of at least "
            f"min_tokens ({config.min_tokens}) tokens"
        )
    plan = plan_shards(
        runs,
        seed=config.seed,
        stripe_size=config.stripe_size,
        stripes_per_shard=config.stripes_per_shard,
    )
    sources = tuple(
        _source_entry(config, number, [t for t in tokenized if t.source == number], part)
        for number in range(len(config.all_sources))
    )
    unknown = {
        str(source.name): sum(t.unknown[part] for t in tokenized if t.source == number)
        for number, source in enumerate(config.all_sources)
    }
    return Layout(plan, unknown, tuple(entry for entry in sources if entry.documents))


def _source_entry(
    config: PrepareConfig, number: int, tokenized: Sequence[TokenizedPortion], part: int
) -> SourceEntry:
    source = config.all_sources[number]
    own_part = HELD_OUT if number >= len(config.sources) else TRAINING
    skipped = sum_counts(portion.skipped for portion in tokenized) if part == own_part else {}
    runs = [run for portion in tokenized if (run := portion.runs[part]) is not None]
    assert source.name is not None
    return SourceEntry(
        name=source.name,
        weight=1.0 if part == HELD_OUT else source.weight,
        documents=sum(portion.documents[part] for portion in tokenized),
        documents_skipped=skipped,
        bytes_read=sum(portion.bytes for portion in tokenized),
        samples=sum(len(run.ids) for run in runs),
        tokens=sum(int(run.lengths.sum()) for run in runs),
    )


@dataclass(frozen=True)
class DataSetWriter:
    """Writes data sets from runs."""

    config: PrepareConfig
    tokenizer: TokenizerFiles
    fingerprint: str
    """Digest of the configuration and the source files."""
    provenance: Provenance
    runs: Storage
    report: Progress

    def write(self, storage: Storage, layout: Layout, *, held_out: str | None = None) -> Manifest:
        """Write a data set.

        Args:
            storage: folder of the data set.
            layout: layout of the samples.
            held_out: fingerprint of its held-out data set, which was already written.
        """
        shards = self._write_shards(storage, layout.plan)
        lengths = layout.plan.lengths
        tokenizer_files = {
            f"{TOKENIZER_DIR}/{name}": text.encode()
            for name, text in self.tokenizer.contents.items()
        }
        unknown = layout.unknown_tokens if self.tokenizer.unknown_id is not None else None
        provenance = self.provenance.model_copy(update={"unknown_tokens": unknown})
        others = {LENGTHS: _npy(lengths), PROVENANCE: provenance.to_json(), **tokenizer_files}
        manifest = Manifest(
            samples=len(lengths),
            tokens=int(lengths.sum(dtype=np.int64)),
            stripes=sum(shard.stripes for shard in shards),
            stripe_size=self.config.stripe_size,
            seq_len=self.config.seq_len,
            seed=self.config.seed,
            packing=self.config.packing,
            pairs=self.config.pairs,
            token_dtype=token_dtype(self.tokenizer),
            length_histogram=tuple(
                np.bincount(lengths, minlength=self.config.seq_len + 1).tolist()
            ),
            vocabulary=self.tokenizer.vocabulary(),
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            sources=layout.sources,
            files=(*shards, *(write_file(storage, path, data) for path, data in others.items())),
            preparation=self.fingerprint,
            held_out=held_out,
        )
        # Last: a folder without a manifest is no data set.
        manifest.write(storage)
        return manifest

    def _write_shards(self, storage: Storage, plan: Plan) -> list[FileEntry]:
        work = WriteShard(
            data_set=storage,
            runs=self.runs,
            token_bytes=np.dtype(token_dtype(self.tokenizer)).itemsize,
            stripe_size=self.config.stripe_size,
            packed=self.config.packing != "none",
            pairs=self.config.pairs,
        )
        entries: list[FileEntry] = []
        self.report("write shards", 0, len(plan.shards), "shards")
        for entry in run_in_parallel(plan.shards, work):
            entries.append(entry)
            self.report("write shards", len(entries), len(plan.shards), "shards")
        return sorted(entries, key=lambda entry: entry.path)


def _npy(lengths: npt.NDArray[np.int32]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, lengths.astype("<i4"))
    return buffer.getvalue()


def prepare(
    config: PrepareConfig,
    out: str,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    session: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Manifest:
    """Make a data set of `config.sources` in the folder or URL `out`.

    Paths, tokenizer and `out` are checked first. The rest needs Ray, which must be running or is
    started by `session`.

    The same configuration and files give the same bytes, at any parallelism. The manifest is
    written last, when the data set is complete. An existing data set that was made from the same
    configuration and files is returned unchanged. After an interruption, a trained tokenizer
    remains in `out` for the next attempt.

    The driver needs about 60 bytes per sample. Removing duplicates needs another 17 bytes per
    document, and near duplicates 530. Every worker holds a portion of the text (2 to 64 MiB) or one
    shard.

    Raises:
        UserError: one line per problem with paths, text, tokenizer or `out`.
    """
    report = progress or (lambda stage, done, total, unit: None)
    corpus = Corpus.find(config, report)
    load = config.tokenizer.load
    tokenizer = load_tokenizer(load) if load is not None else None
    for setting in tokenizer.switched_off if tokenizer else ():
        report(f"the tokenizer's {setting} is switched off: ids are not drawn", 1, 1, "tokenizers")
    fingerprint, provenance = corpus.fingerprint(tokenizer), corpus.provenance(tokenizer)
    # An absolute path, since workers run in other folders.
    target = Target(Storage(Storage(out).uri()))
    holds_out = config.held_out is not None
    if found := target.prepared(fingerprint, provenance, held_out=holds_out, overwrite=overwrite):
        report("already prepared", found.samples, found.samples, "samples")
        return found
    check_filters(config.filters)
    with target.building() as runs, session():
        corpus = corpus.without_repeats()
        tokenizer = tokenizer or _resume_or_train(corpus, target.storage, fingerprint)
        tokenized = corpus.tokenize(tokenizer, runs)
        # The fraction held out no document: tokenise again with one that holds out exactly one.
        if fraction := fraction_for_one(config, tokenized):
            corpus = replace(corpus, config=config.model_copy(update={"held_out": fraction}))
            tokenized = corpus.tokenize(tokenizer, runs)
        layouts = [lay_out(config, tokenized, part) for part in range(2 if config.held_out else 1)]
        writer = DataSetWriter(config, tokenizer, fingerprint, provenance, runs, report)
        # Only now: until here, an existing data set stays intact.
        target.clear()
        parts = [writer.write(target.storage.sub(HELD_OUT_FOLDER), part) for part in layouts[1:]]
        held_out = parts[0].fingerprint if parts else None
        return writer.write(target.storage, layouts[0], held_out=held_out)


def _resume_or_train(corpus: Corpus, storage: Storage, fingerprint: str) -> TokenizerFiles:
    """Return the tokenizer of an interrupted preparation, or train and store a new one."""
    if left_tokenizer := load_kept_tokenizer(storage, fingerprint):
        corpus.report("take the tokenizer trained before", 1, 1, "tokenizers")
        return left_tokenizer
    tokenizer = corpus.train_tokenizer()
    keep_tokenizer(storage, fingerprint, tokenizer)
    return tokenizer


def fraction_for_one(config: PrepareConfig, tokenized: Sequence[TokenizedPortion]) -> float | None:
    """Return the fraction that holds out exactly one document, if the configured one holds out
    none.

    Returns:
        None if the configured fraction holds out documents, or if there is only one document.
    """
    training, held_out = (sum(portion.documents[part] for portion in tokenized) for part in (0, 1))
    if not config.held_out_fraction or held_out or training == 1:
        return None
    # One in a hundred of a few books is no book, so the document with the smallest draw is held
    # out. A tokenizer trained on the corpus has seen it.
    return math.nextafter(min(portion.least_draw for portion in tokenized), 1.0)
