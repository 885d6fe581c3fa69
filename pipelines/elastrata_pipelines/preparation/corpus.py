"""The corpus: all source files, processed in parallel."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format.manifest import TokenType
from elastrata_pipelines.preparation.config import PrepareConfig
from elastrata_pipelines.preparation.deduplication import signature_version
from elastrata_pipelines.preparation.pieces import describe_windows
from elastrata_pipelines.preparation.pipeline import split_in_parallel
from elastrata_pipelines.preparation.portions import (
    Group,
    NumberedPortion,
    Place,
    ReadWork,
    Repeats,
    group_files,
    portion_bytes,
)
from elastrata_pipelines.preparation.provenance import (
    NOT_A_FILE,
    SIDECAR,
    FilesOfSource,
    Provenance,
    find_empty_sources,
)
from elastrata_pipelines.preparation.screening import (
    FingerprintedPortion,
    FingerprintWork,
    mark_repeats,
)
from elastrata_pipelines.preparation.sources import SourceFile, find_changes, find_files
from elastrata_pipelines.preparation.tokenizer import TokenizerFiles
from elastrata_pipelines.preparation.training import train_tokenizer
from elastrata_pipelines.preparation.work import (
    ChooseTrainingText,
    TokenizedPortion,
    TokenizeWork,
    TrainingText,
)
from elastrata_pipelines.storage import Storage

Progress = Callable[[str, int, int, str], None]
"""Function of a stage's name, the amount done, the total amount, and the unit."""

_MAX_PROBLEMS = 100
# An estimate, for progress and for the share of text to train on.
_TEXT_PER_COMPRESSED_BYTE = 4

# The method of making pairs, part of the fingerprint: data sets with other pairs are made again.
_PAIRS = "partners"
_SKIP = "bad_documents: skip passes it over"

Result = TypeVar("Result", TokenizedPortion, TrainingText, FingerprintedPortion)


@dataclass(frozen=True)
class Corpus:
    """The files of all sources, in order."""

    config: PrepareConfig
    files: tuple[SourceFile, ...]
    report: Progress
    passed_over: tuple[int, ...] = ()
    """Number of skipped pipes, broken links and the like in the folders of each source."""
    sidecars: tuple[int, ...] = ()
    """Number of skipped files beside the data in the folders of each source."""
    repeats: Mapping[Place, Repeats] | None = None
    """Marks of repeated documents by portion; None before they are looked for."""

    @staticmethod
    def find(config: PrepareConfig, report: Progress) -> Corpus:
        """Find all files.

        Raises:
            UserError: paths are missing, unreadable or empty.
        """
        found = [find_files(number, source) for number, source in enumerate(config.all_sources)]
        problems = [problem for source in found for problem in source.problems]
        if config.bad_documents == "fail":
            problems += [f"{line} ({_SKIP})" for source in found for line in source.others]
        if problems:
            raise UserError(*_limit_problems(problems))
        files = tuple(file for source in found for file in source.files)
        for line in describe_windows(files):
            report(line, 1, 1, "files")
        others = tuple(len(source.others) for source in found)
        return Corpus(config, files, report, others, tuple(source.sidecars for source in found))

    def fingerprint(self, tokenizer: TokenizerFiles | None) -> str:
        """Return a hash of the configuration and the files, independent of their location."""
        files = [(file.source, file.name, file.bytes, file.stamp) for file in self.files]
        values: list[Any] = [self._configuration(tokenizer), files]
        if self._tokenizer_corpus is not None:
            values.append(self._tokenizer_corpus.fingerprint(tokenizer))
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def provenance(self, tokenizer: TokenizerFiles | None) -> Provenance:
        """Return the parts of the fingerprint in readable form."""
        files = {}
        for number, source in enumerate(self.config.all_sources):
            own_files = [(f.name, f.bytes, f.stamp) for f in self.files if f.source == number]
            digest = hashlib.sha256(json.dumps(own_files).encode()).hexdigest()
            size = sum(size for _, size, _ in own_files)
            files[str(source.name)] = FilesOfSource(files=len(own_files), bytes=size, sha256=digest)
        return Provenance(
            configuration=self._configuration(tokenizer),
            files=files,
            switched_off=tokenizer.switched_off if tokenizer else (),
        )

    @cached_property
    def _tokenizer_corpus(self) -> Corpus | None:
        """Corpus on which the tokenizer is trained; None if it is this one."""
        tokenizer = self.config.tokenizer
        if not tokenizer.sources:
            return None
        tokenizer_config = tokenizer.model_copy(update={"sources": ()})
        changed = {"sources": tokenizer.sources, "tokenizer": tokenizer_config}
        return Corpus.find(self.config.model_copy(update=changed), self.report)

    def _configuration(self, tokenizer: TokenizerFiles | None) -> dict[str, Any]:
        config = self.config.model_dump(mode="json")
        learned_from = config["tokenizer"]["sources"]
        for source in (*config["sources"], *_as_list(config["held_out"]), *learned_from):
            # A corpus may be moved without being prepared again.
            del source["paths"]
        # Earlier versions did not have this key, and existing data sets must keep their
        # fingerprints.
        if not learned_from:
            del config["tokenizer"]["sources"]
        for key in ("filters", "deduplication"):
            # Likewise.
            if not config[key]:
                del config[key]
        if self.config.deduplication and self.config.deduplication.method == "near":
            config["deduplication"]["algorithm"] = signature_version()
        if tokenizer:
            config["tokenizer"] = tokenizer.fingerprint
        if self.config.pairs:
            config["pairs"] = _PAIRS
        return config

    def without_repeats(self) -> Corpus:
        """Return the corpus without repeated documents, if these are to be removed.

        Raises:
            UserError: the corpus cannot be read, or a library is missing.
        """
        deduplication = self.config.deduplication
        if deduplication is None or self.repeats is not None:
            return self
        found = self._process(FingerprintWork(self.config, deduplication), "look for duplicates")
        marks = mark_repeats(deduplication, {printed.place: printed.prints for printed in found})
        return replace(self, repeats=marks)

    def train_tokenizer(self) -> TokenizerFiles:
        """Train the configured tokenizer on text chosen by hash.

        Raises:
            UserError: the corpus cannot be read, or one of its sources has no text.
        """
        if self._tokenizer_corpus is not None:
            return self._tokenizer_corpus.without_repeats().train_tokenizer()
        settings = self.config.tokenizer
        work = ChooseTrainingText(self.config, settings.max_bytes / max(1, self._text_bytes))
        results = self._process(work, "read text for the tokenizer")
        if barren := list(find_empty_sources(self.config, results)):
            raise UserError(*barren)
        chosen = [piece for result in results for piece in result.chosen]
        texts: list[str] = []
        size = 0
        # Sorted by hash, so that the choice does not depend on which process was first.
        for _, text in sorted(chosen):
            size += len(text.encode())
            if texts and size > settings.max_bytes:
                break
            texts.append(text)
        if not texts:
            raise UserError("sources: no text to train a tokenizer on")
        self.report("train the tokenizer", 0, 1, "tokenizers")
        tokenizer = train_tokenizer(texts, settings, seq_len=self.config.seq_len)
        self.report("train the tokenizer", 1, 1, "tokenizers")
        return tokenizer

    def tokenize(self, tokenizer: TokenizerFiles, runs: Storage) -> list[TokenizedPortion]:
        """Tokenise all portions into runs, and return the results in the order of the corpus.

        Raises:
            UserError: the corpus cannot be read, or `seq_len` has no room for more than special
                tokens.
        """
        frame = tokenizer.frame()
        pair_frame = tokenizer.pair_frame() if self.config.pairs else None
        if pair_frame and not pair_frame.has_segments:
            self.report("the tokenizer's types of pairs are not 0 and 1, as in training", 1, 1,
                        "tokenizers")  # fmt: skip
        special = (pair_frame or frame).num_tokens
        if self.config.seq_len < special + 2:
            raise UserError(
                f"seq_len: {self.config.seq_len} leaves no room for text: the tokenizer adds "
                f"{special} special tokens to every sample"
            )
        work = TokenizeWork(
            config=self.config,
            tokenizer_json=tokenizer.tokenizer_json,
            frame=frame,
            pair_frame=pair_frame,
            token_dtype=token_dtype(tokenizer),
            unknown_id=tokenizer.unknown_id,
            runs=runs,
        )
        tokenized = [*self._process(work, "tokenize"), *self._skipped_entries()]
        encoders = sorted({result.encoder for result in tokenized} - {""})
        size = sum(result.bytes for result in tokenized)
        altered, longer = find_changes(self.files)
        if altered:
            raise UserError(*_limit_problems(altered))
        for line in _limit_problems(longer):
            self.report(line, 1, 1, "files")
        self.report(f"tokenized with {', '.join(encoders)}", size, size, "bytes")
        return tokenized

    def _skipped_entries(self) -> list[TokenizedPortion]:
        """Return everything that was skipped as portions without documents."""
        return [
            TokenizedPortion(
                place=(len(self.files), source), source=source, bytes=0, documents=(0, 0),
                runs=(None, None), skipped={reason: count},
            )
            for reason, counts in ((NOT_A_FILE, self.passed_over), (SIDECAR, self.sidecars))
            for source, count in enumerate(counts)
            if count
        ]  # fmt: skip

    @property
    def _text_bytes(self) -> int:
        """Size of all text in bytes; an estimate if files are compressed."""
        return sum(
            file.bytes * (_TEXT_PER_COMPRESSED_BYTE if file.compression else 1)
            for file in self.files
        )

    def _process(self, work: Callable[[NumberedPortion], Result], stage: str) -> list[Result]:
        """Apply `work` to every portion, and return the results in the order of the corpus."""
        size = portion_bytes(self._text_bytes)
        groups = [
            Group(
                number,
                files,
                None if self.repeats is None else self._marks_by_group.get(number, {}),
            )
            for number, files in enumerate(group_files(self.files, size))
        ]
        read = ReadWork(self.config, size)
        results: list[Result] = []
        done = num_problems = 0
        for result in split_in_parallel(groups, read, work):
            results.append(result)
            done += result.bytes
            num_problems += len(result.problems)
            self.report(stage, done, max(done, self._text_bytes), "bytes")
            # The preparation fails anyway, so the rest is not read.
            if num_problems > _MAX_PROBLEMS:
                break
        # Results arrive in any order.
        results.sort(key=lambda result: result.place)
        problems = [problem for result in results for problem in result.problems]
        if problems:
            raise UserError(*_limit_problems(_merge_problems(problems)))
        return results

    @cached_property
    def _marks_by_group(self) -> dict[int, dict[int, Repeats]]:
        groups: dict[int, dict[int, Repeats]] = {}
        for (group, number), marks in (self.repeats or {}).items():
            groups.setdefault(group, {})[number] = marks
        return groups


def _as_list(value: object) -> list[dict[str, object]]:
    return value if isinstance(value, list) else []


_OF_ALL_DOCUMENTS = re.compile(r"no (?:field|column) '.*?' |(?:field|column) '.*?' (?:is|holds) ")
"""The cause of a problem that usually every document has."""


def _merge_problems(problems: Sequence[str]) -> list[str]:
    """Return the problems, with one line for all documents that lack the text field."""
    causes = [found and found.group() for found in map(_OF_ALL_DOCUMENTS.search, problems)]
    counts, merged = Counter(causes), dict[str, str]()
    for cause, problem in zip(causes, problems, strict=True):
        more = counts[cause] - 1 if cause else 0
        also = f" (and {more:,} more like it, of those read so far)" if more else ""
        merged.setdefault(cause or problem, f"{problem}{also}")
    return list(merged.values())


def _limit_problems(problems: Sequence[str]) -> list[str]:
    """Return the first problems, and a last line if there are more."""
    if len(problems) <= _MAX_PROBLEMS:
        return list(problems)
    return [*problems[:_MAX_PROBLEMS], "... and more; only the first are listed"]


def token_dtype(tokenizer: TokenizerFiles) -> TokenType:
    """Return the smallest integer type that holds every id."""
    return "uint16" if tokenizer.vocabulary_size <= np.iinfo(np.uint16).max + 1 else "uint32"
