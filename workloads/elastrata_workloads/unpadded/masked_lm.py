"""Masked language modelling: choice of masked tokens, batches, and the workloads' base class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field
from typing_extensions import override

from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.rows import Rows, SampleRng
from elastrata_workloads.unpadded.batch import UnpaddedBatch, filler_batch, unpad
from elastrata_workloads.unpadded.workload import UnpaddedTransformer

Ints = npt.NDArray[np.int64]

# The shares of Devlin et al. 2019, section 3.1.
MASKED = 0.8
RANDOM = 0.1
"""Shares of predicted tokens replaced by the mask token and by a random token; the rest stay."""

# Numbers of independent streams of hashes, see `SampleRng`.
_CHOICE, _REPLACEMENT = 1, 2
_SCORE_BITS = np.uint64(40)
_LOW = np.uint64(2**32 - 1)


@dataclass(frozen=True, kw_only=True)
class MaskingRule:
    """Number and grouping of masked tokens."""

    probability: float
    """Share of each sample's maskable tokens to mask."""
    whole_word: bool
    """Whether all pieces of a word are masked together."""
    max_predictions: int | None
    """Maximum number of masked tokens per sample; None: no limit."""


@dataclass(frozen=True)
class Tables:
    """Properties of a vocabulary's ids as arrays, indexed by id."""

    maskable: npt.NDArray[np.bool_]
    continues: npt.NDArray[np.bool_]
    replacements: Ints
    """Ids that may replace a token."""


@lru_cache(maxsize=16)
def tables(vocabulary: Vocabulary) -> Tables:
    """Return the vocabulary's properties as arrays, cached."""
    maskable = np.ones(vocabulary.size, dtype=np.bool_)
    maskable[list(vocabulary.special_ids)] = False
    continues = np.zeros(vocabulary.size, dtype=np.bool_)
    continues[list(vocabulary.continuation_ids)] = True
    return Tables(maskable, continues, np.flatnonzero(maskable))


def choose_masked_tokens(
    rows: Rows, starts: Ints, table: Tables, rule: MaskingRule, rng: SampleRng
) -> Ints:
    """Return the indices of the tokens to predict, ascending, into the T tokens of `rows`.

    As in Devlin et al. 2019, each sample has round(probability x maskable tokens) of them, and at
    least one. Whole words are taken in random order while at least half of the next one fits, so
    that the expected count is the same.

    Args:
        rows: the samples.
        starts: first tokens of samples and documents, ascending; no word crosses them.
        table: the vocabulary's properties.
        rule: the number of tokens to choose.
        rng: the samples' random numbers.
    """
    candidates = np.flatnonzero(table.maskable[rows.tokens])
    if not candidates.size:
        return candidates
    samples = np.repeat(np.arange(len(rows)), rows.lengths)[candidates]
    counts = np.bincount(samples, minlength=len(rows))
    # At least one prediction per sample, so that no sample is wasted.
    targets = np.maximum(1, np.rint(rule.probability * counts).astype(np.int64))
    cap = len(candidates) if rule.max_predictions is None else rule.max_predictions
    scores = rng.hashes(_CHOICE)
    if not rule.whole_word:
        order = _by_score(samples, scores[candidates])
        return np.sort(
            candidates[order[_index_in_group(counts) < np.minimum(targets, cap)[samples]]]
        )
    firsts = _word_firsts(rows, starts, candidates, table)
    return _choose_words(candidates, samples, firsts, scores[candidates[firsts]], targets, cap)


def replace_masked_tokens(
    tokens: Ints, predicted: Ints, mask_id: int, table: Tables, rng: SampleRng
) -> None:
    """Replace predicted tokens in place: 80% by the mask, 10% by a random token, 10% unchanged."""
    draws = rng.hashes(_REPLACEMENT)[predicted]
    shares = (draws >> np.uint64(32)).astype(np.float64) * 2.0**-32
    # The high 32 bits decide whether to replace, the low 32 bits select the random token. Multiply
    # and shift maps the latter to an index without a division.
    picks = ((draws & _LOW) * np.uint64(len(table.replacements))) >> np.uint64(32)
    new = np.where(shares < MASKED, mask_id, table.replacements[picks.astype(np.int64)])
    replaced = shares < MASKED + RANDOM
    tokens[predicted[replaced]] = new[replaced]


def _by_score(samples: Ints, scores: npt.NDArray[np.uint64]) -> Ints:
    """Return the order of tokens by sample, then by score."""
    # One combined key: a sort by two keys is several times slower.
    keys = (samples.astype(np.uint64) << _SCORE_BITS) | (scores >> (np.uint64(64) - _SCORE_BITS))
    return np.argsort(keys, kind="stable")


def _index_in_group(counts: Ints) -> Ints:
    """Return 0, 1, 2, ... within each group of `counts` neighbours."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _word_firsts(rows: Rows, starts: Ints, candidates: Ints, table: Tables) -> Ints:
    """Return the indices of the candidates at which words begin, shape [U]."""
    begins = ~table.continues[rows.tokens]
    # A continuation piece at the start of a document begins a word there.
    begins[starts] = True
    # No word continues after a token that is never masked (CLS, SEP).
    begins[1:] |= ~table.maskable[rows.tokens[:-1]]
    return np.flatnonzero(begins[candidates])


def _choose_words(
    candidates: Ints,
    samples: Ints,
    firsts: Ints,
    scores: npt.NDArray[np.uint64],
    targets: Ints,
    cap: int,
) -> Ints:
    sizes = np.diff(np.append(firsts, len(candidates)))
    word_samples = samples[firsts]
    order = _by_score(word_samples, scores)
    sizes, word_samples, firsts = sizes[order], word_samples[order], firsts[order]
    before = np.cumsum(sizes) - sizes
    bases = np.append(0, np.cumsum(np.bincount(samples)))
    # From here, `before` counts the candidates that precede a word within its sample.
    before -= bases[word_samples]
    # Takes a word if at least half of it fits, and always the first word.
    is_taken = (2 * before + sizes <= 2 * targets[word_samples]) | (before == 0)
    before, sizes, firsts = before[is_taken], sizes[is_taken], firsts[is_taken]
    within = _index_in_group(sizes)
    candidate_indices = np.repeat(firsts, sizes) + within
    # `max_predictions` is a hard limit: it may split a word.
    fits = np.repeat(before, sizes) + within < cap
    return np.sort(candidates[candidate_indices[fits]])


_DROPOUT = 3


def mask_rows(
    rows: Rows,
    vocabulary: Vocabulary,
    seed: int,
    rule: MaskingRule,
    *,
    dropout: bool,
    terms: Sequence[str],
) -> UnpaddedBatch:
    """Return the micro-batch of `rows`; the same sample and epoch always get the same masks.

    Raises:
        ValueError: the vocabulary has no mask token.
    """
    if vocabulary.mask_id is None:
        raise ValueError("the vocabulary has no mask token")
    if not len(rows):
        return filler_batch(rows, pad_id=vocabulary.pad_id, dropout=dropout, terms=terms)
    rng, table = SampleRng(seed, rows), tables(vocabulary)
    predicted = choose_masked_tokens(rows, rows.segment_starts, table, rule, rng)
    # A copy: `replace` changes it in place, and the data set's arrays are shared.
    tokens = rows.tokens.astype(np.int64)
    targets = tokens[predicted]
    replace_masked_tokens(tokens, predicted, vocabulary.mask_id, table, rng)
    return unpad(
        rows,
        tokens=tokens,
        predicted=predicted,
        targets=targets,
        dropout_keys=rng.hashes(_DROPOUT) if dropout else None,
        terms=terms,
    )


def masking_problems(name: str, manifest: Manifest) -> list[str]:
    """Return one line per reason why a data set's tokens cannot be masked."""
    vocabulary, lines = manifest.vocabulary, []
    if vocabulary.mask_id is None:
        lines.append(
            f"workload: {name} needs a tokenizer with a mask token; this data set's has none"
        )
    if vocabulary.size <= len(set(vocabulary.special_ids)):
        lines.append(f"workload: {name} needs tokens to mask; this data set has special ids only")
    return lines


class MaskedTransformer(UnpaddedTransformer):
    """An unpadded transformer that predicts masked tokens."""

    predicts: ClassVar = "mlm"

    mask_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of each sample's maskable tokens to predict; at least one token."""
    max_predictions: Annotated[int, Field(gt=0, le=2**24)] | None = None
    """Maximum predictions per sample. Default: no limit."""
    whole_word: bool = False
    """Whether to mask all pieces of a word together."""

    @property
    def masking(self) -> MaskingRule:
        """The masking rule of this workload."""
        return MaskingRule(
            probability=self.mask_probability,
            whole_word=self.whole_word,
            max_predictions=self.max_predictions,
        )

    @override
    def problems(self, manifest: Manifest) -> list[str]:
        """Return one line per reason why the model cannot train on this data set."""
        return [*masking_problems(self.name, manifest), *self.size_problems(manifest)]
