"""Tasks that the processes of a preparation run on one portion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise

import numpy as np

from elastrata_pipelines.hashing import combine, combine_one, text_hash, uniform_one
from elastrata_pipelines.preparation.config import PrepareConfig
from elastrata_pipelines.preparation.documents import (
    Document,
    count_copies,
)
from elastrata_pipelines.preparation.encoders import CheckedEncoder, make_encoder, split_text
from elastrata_pipelines.preparation.packing import (
    Frame,
    Texts,
    pack_best_fit,
    pack_concat,
    split_documents,
)
from elastrata_pipelines.preparation.pairs import PairFrame, make_pairs, split_sentences
from elastrata_pipelines.preparation.portions import NumberedPortion
from elastrata_pipelines.preparation.samples import Samples, concatenate
from elastrata_pipelines.preparation.screening import HELD_OUT, TRAINING, split_portion
from elastrata_pipelines.preparation.shards import Run, write_run
from elastrata_pipelines.storage import Storage

_TEXT_SALT = text_hash("tokenizer training")
_TRAINING_TEXT_CHARACTERS = 4096


@dataclass(frozen=True, kw_only=True)
class TokenizedPortion:
    """Results of a tokenised portion that are sent to the driver."""

    place: tuple[int, int]
    source: int
    bytes: int
    documents: tuple[int, int]
    """Training and held-out documents, each counted once."""
    runs: tuple[Run | None, Run | None]
    """Training and held-out samples; None for a part without samples."""
    encoder: str = ""
    problems: tuple[str, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)
    """Skipped documents, by reason."""
    unknown: tuple[int, int] = (0, 0)
    """Unknown tokens in the training and held-out samples."""
    least_draw: float = 1.0
    """Smallest `draw_held_out` of the training documents; 1 without training documents."""

    @property
    def is_empty(self) -> bool:
        """Whether the portion yields no samples."""
        return not any(self.runs)


@dataclass(frozen=True)
class TrainingText:
    """Text of a portion on which a tokenizer is trained."""

    place: tuple[int, int]
    source: int
    bytes: int
    documents: tuple[int, int]
    chosen: tuple[tuple[int, str], ...]
    """Hash and text of each chosen piece."""
    problems: tuple[str, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether the portion has no documents."""
        return not any(self.documents)


@dataclass(frozen=True)
class ChooseTrainingText:
    """Task that chooses a share of a portion's text by hash, in pieces of several lines."""

    config: PrepareConfig
    share: float

    def __call__(self, numbered: NumberedPortion) -> TrainingText:
        """Return the chosen pieces of the portion's documents, without held-out ones."""
        found, chosen = split_portion(self.config, numbered), []
        documents, held_out = found.documents
        if numbered.source < len(self.config.sources):
            for document in documents:
                for number, text in enumerate(_pieces(document.text)):
                    hashed = combine_one(combine_one(document.id, number), _TEXT_SALT)
                    if uniform_one(hashed) < self.share:
                        chosen.append((hashed, text))
        return TrainingText(
            place=numbered.place,
            source=numbered.source,
            bytes=numbered.portion.bytes,
            documents=(len(documents), len(held_out)),
            chosen=tuple(chosen),
            problems=found.problems,
            skipped=found.skipped,
        )


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of whole lines, each of a few thousand characters if lines allow it.

    Very long lines are divided between words.
    """
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + _TRAINING_TEXT_CHARACTERS) + 1 or len(text)
        line_parts = split_text(text[begin:end], lambda whole, left, right: True)
        # Parts that end inside a word are dropped: words of that length would take the trainer
        # hours.
        yield from (part for part, between_words in line_parts if between_words)
        begin = end


@dataclass(frozen=True)
class TokenizeWork:
    """Task that turns a portion into runs."""

    config: PrepareConfig
    tokenizer_json: str
    frame: Frame
    pair_frame: PairFrame | None
    token_dtype: str
    unknown_id: int | None
    runs: Storage
    """Folder in which the runs are written."""

    def __call__(self, numbered: NumberedPortion) -> TokenizedPortion:
        """Write the portion's runs, unless problems end the preparation anyway."""
        found = split_portion(self.config, numbered)
        num_documents = len(found.documents[TRAINING]), len(found.documents[HELD_OUT])
        encoder = make_encoder(self.tokenizer_json)
        runs: list[Run | None] = []
        names, unknown = [""], [0, 0]
        for part, documents in enumerate(found.documents):
            # Held-out documents are not repeated: each counts once in an evaluation.
            weight = 1.0 if part == HELD_OUT else self.config.all_sources[numbered.source].weight
            run, name = None, ""
            if documents and not found.problems:
                samples, name = self._make_samples(documents, weight, encoder)
                unknown[part] = int(np.count_nonzero(samples.tokens == self.unknown_id))
                path = "{}-{}-{}".format(*numbered.place, part)
                run = (
                    write_run(self.runs, path, samples, self.config.seed) if len(samples) else None
                )
            runs.append(run)
            names.append(name)
        return TokenizedPortion(
            place=numbered.place,
            source=numbered.source,
            bytes=numbered.portion.bytes,
            documents=num_documents,
            runs=(runs[TRAINING], runs[HELD_OUT]),
            # The name is empty if nothing was encoded.
            encoder=max(names),
            problems=found.problems,
            skipped=found.skipped,
            unknown=(unknown[TRAINING], unknown[HELD_OUT]),
            least_draw=found.least_draw,
        )

    def _make_samples(
        self, documents: list[Document], weight: float, encoder: CheckedEncoder
    ) -> tuple[Samples, str]:
        """Return the samples of documents in all copies, and the name of the encoder.

        `documents` is emptied.
        """
        ids = np.array([document.id for document in documents], dtype=np.uint64)
        counts = np.array([count_copies(document, weight) for document in documents])
        make = self._make_sentence_pairs if self.pair_frame else self._make_packed
        texts = [document.text for document in documents]
        # A long text is freed as soon as its ids exist.
        documents.clear()
        sample, name = make(texts, encoder)
        # At least one round, since `concatenate` needs a part.
        made = [
            sample(combine(ids, np.uint64(copy)), counts > copy)
            for copy in range(max(1, int(counts.max())))
        ]
        return concatenate(made), name

    def _make_packed(self, texts: list[str], encoder: CheckedEncoder) -> _SampleMaker:
        tokens, lengths, name = encoder.encode(texts, self.token_dtype)
        texts.clear()
        pack = {"none": split_documents, "concat": pack_concat, "best_fit": pack_best_fit}[
            self.config.packing
        ]

        def sample(ids: np.ndarray, is_copied: np.ndarray) -> Samples:
            copied = Texts(ids, lengths, tokens).where(is_copied)
            return pack(
                copied, self.frame, seq_len=self.config.seq_len, min_tokens=self.config.min_tokens
            )

        return sample, name

    def _make_sentence_pairs(self, texts: list[str], encoder: CheckedEncoder) -> _SampleMaker:
        sentences = [split_sentences(text) for text in texts]
        texts.clear()
        bounds = list(accumulate((len(inside) for inside in sentences), initial=0))
        flat = list(chain.from_iterable(sentences))
        sentences.clear()
        tokens, lengths, name = encoder.encode(flat, self.token_dtype)
        flat.clear()
        ends = np.cumsum(lengths)
        pieces = [tokens[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        grouped = [[piece for piece in pieces[a:b] if len(piece)] for a, b in pairwise(bounds)]

        def sample(ids: np.ndarray, is_copied: np.ndarray) -> Samples:
            assert self.pair_frame is not None
            chosen = [inside for inside, keep in zip(grouped, is_copied, strict=True) if keep]
            return make_pairs(
                chosen, ids[is_copied].tolist(), self.pair_frame,
                seq_len=self.config.seq_len, min_tokens=self.config.min_tokens,
                dtype=np.dtype(self.token_dtype),
            )  # fmt: skip

        return sample, name


_SampleMaker = tuple[Callable[[np.ndarray, np.ndarray], Samples], str]
