"""The data set: shards, lengths, tokenizer and manifest, written from the runs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import FileEntry, Manifest, SourceEntry, write_file
from elastrata_pipelines.format.manifest import LENGTHS, TOKENIZER_DIR
from elastrata_pipelines.preparation.config import PrepareConfig
from elastrata_pipelines.preparation.corpus import Progress, token_dtype
from elastrata_pipelines.preparation.pipeline import run_in_parallel
from elastrata_pipelines.preparation.provenance import PROVENANCE, Provenance
from elastrata_pipelines.preparation.screening import HELD_OUT, TRAINING
from elastrata_pipelines.preparation.shards import Plan, WriteShard, plan_shards
from elastrata_pipelines.preparation.skipped import barren_sources, total
from elastrata_pipelines.preparation.tokenizer import TokenizerFiles
from elastrata_pipelines.preparation.work import Tokenized
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True)
class Layout:
    """All that the manifest says, but for the files."""

    plan: Plan
    unknown_tokens: dict[str, int]
    """By the names of the sources."""
    sources: tuple[SourceEntry, ...]


def lay_out(config: PrepareConfig, tokenized: Sequence[Tokenized], part: int) -> Layout:
    """Decides where each sample of one part (for training, or held out) is stored.

    Raises:
        UserError: no sample is left, or none of one of the sources.
    """
    if barren := list(barren_sources(config, tokenized)):
        raise UserError(*barren)
    runs = [run for portion in tokenized if (run := portion.runs[part]) is not None]
    documents = sum(portion.documents[part] for portion in tokenized)
    if not runs:
        if part == HELD_OUT and config.held_out_fraction and not documents:
            raise UserError(
                "held_out: of a single document nothing can be held out; give more, make documents "
                "of its parts (documents: paragraph, or line), or hold out nothing (--held-out 0)"
            )
        where = "held_out" if part == HELD_OUT else "sources"
        raise UserError(
            f"{where}: nothing is left: {documents} documents, no sample of at least "
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
    config: PrepareConfig, number: int, tokenized: Sequence[Tokenized], part: int
) -> SourceEntry:
    source = config.all_sources[number]
    own_part = HELD_OUT if number >= len(config.sources) else TRAINING
    skipped = total(portion.skipped for portion in tokenized) if part == own_part else {}
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
    """A digest of the configuration and the source files."""
    provenance: Provenance
    runs: Storage
    report: Progress

    def write(self, storage: Storage, layout: Layout, *, held_out: str | None = None) -> Manifest:
        """Writes a data set, its manifest last.

        Args:
            storage: its folder.
            layout: of its samples.
            held_out: fingerprint of what was held out of it and is written already.
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
