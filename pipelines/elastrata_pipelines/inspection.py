"""Inspection: the content of a data set, its balance at any number of workers, and its
integrity."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.balance import Balance, batches_of_order, draw_batches, measure_balance
from elastrata_pipelines.baselines import SchemeBalance, compare
from elastrata_pipelines.checked_json import describe_error, read_bytes
from elastrata_pipelines.deal import Ints, WorkModel
from elastrata_pipelines.errors import UserError, pluralize
from elastrata_pipelines.format import (
    HELD_OUT,
    FileEntry,
    Manifest,
    file_problem,
    read_held_out,
    read_shard,
    read_stripes,
)
from elastrata_pipelines.format.manifest import TOKENIZER_DIR
from elastrata_pipelines.order import Order
from elastrata_pipelines.payload import StepLayout, decode, encode
from elastrata_pipelines.preparation.provenance import Provenance, sum_counts
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """One sample as text, including special tokens."""

    sample_id: int
    tokens: int
    parts: list[str]
    """The documents in the sample, or the two halves of a pair."""
    is_next: bool | None
    """Whether the second text of a pair follows the first."""
    seen: str | None = None
    """Text of the sample as the model sees it in the first epoch; None if it was not requested."""


def read_some_rows(storage: Storage, manifest: Manifest, count: int) -> Rows:
    """Return `count` samples, or all if there are fewer, spread over the first stripe.

    Raises:
        UserError: a shard cannot be read.
    """
    (stripe,) = read_stripes(storage, manifest, [0])
    count = min(count, stripe.num_rows)
    # A stripe is sorted by length: evenly spaced rows include short and long samples.
    table = stripe.take(np.arange(count) * stripe.num_rows // count)
    layout = StepLayout(step=1, cuts=[0, count], imbalance=1.0)
    (step,) = decode(encode(table, np.zeros(count, np.int64), [layout]), manifest.token_dtype)
    return step.rows


def make_excerpts(storage: Storage, rows: Rows, seen: Sequence[int] | None = None) -> list[Excerpt]:
    """Return rows as text, decoded by the data set's tokenizer.

    Args:
        storage: the data set.
        rows: some of its samples.
        seen: ids of the samples as the model sees them, end to end.

    Raises:
        UserError: the tokenizer cannot be read.
    """
    tokenizer = _tokenizer(storage)

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    found = []
    begins = np.cumsum(rows.lengths) - rows.lengths
    for number, (begin, length) in enumerate(zip(begins, rows.lengths, strict=True)):
        inside = slice(int(begin), int(begin + length))
        tokens = rows.tokens[inside].tolist()
        cuts = [0, *_inner_cuts(rows, number), int(length)]
        found.append(
            Excerpt(
                sample_id=int(rows.sample_ids[number]),
                tokens=int(length),
                parts=[text(tokens[first:end]) for first, end in pairwise(cuts)],
                is_next=None if rows.is_next is None else bool(rows.is_next[number]),
                seen=None if seen is None else text(seen[inside]),
            )
        )
    return found


def _inner_cuts(rows: Rows, number: int) -> list[int]:
    if rows.second_starts is not None:
        return [int(rows.second_starts[number])]
    return [] if rows.boundaries is None else rows.boundaries[number].tolist()


def _tokenizer(storage: Storage) -> Any:
    from tokenizers import Tokenizer

    where = storage.uri(TOKENIZER_DIR, "tokenizer.json")
    try:
        return Tokenizer.from_buffer(read_bytes(storage, TOKENIZER_DIR, "tokenizer.json"))
    except FileNotFoundError:
        raise UserError(f"{where}: missing; prepare the data set again") from None
    except UserError:
        raise
    # tokenizers raises plain Exception.
    except Exception as error:
        raise UserError(f"{where}: not a tokenizer ({describe_error(error)})") from None


_REASON_NOT_KEPT = "reason not kept"


@dataclass(frozen=True, kw_only=True)
class SourceAccount:
    """Statistics of one source."""

    name: str
    weight: float
    documents: int
    """Training documents, each counted once."""
    held_out: int
    """Held-out documents."""
    skipped: dict[str, int]
    """Skipped documents by reason, most frequent first."""
    samples: int
    tokens: int
    share: float
    """Share of the data set's tokens."""
    unknown_share: float | None
    """Share of unknown tokens in the source; None if the tokenizer knows all text, or they were
    not counted."""


def source_accounts(storage: Storage, manifest: Manifest) -> list[SourceAccount]:
    """Return the statistics of a data set's sources, followed by sources that are held out
    completely.

    Raises:
        UserError: provenance or held-out data cannot be read.
    """
    training = {entry["name"]: entry for entry in map(_values, manifest.sources)}
    held_out: dict[str, dict[str, Any]] = {}
    if found := read_held_out(storage, manifest):
        held_out = {entry["name"]: entry for entry in map(_values, found.sources)}
    provenance = Provenance.read(storage)
    unknown = provenance.unknown_tokens if provenance else None
    return [
        _account(training.get(name), held_out.get(name), manifest.tokens, (unknown or {}).get(name))
        for name in {**training, **held_out}
    ]


def _values(entry: Any) -> dict[str, Any]:
    values = dict(entry)
    skipped = values["documents_skipped"]
    # Version 1 of the format has only the total.
    if isinstance(skipped, int):
        values["documents_skipped"] = {_REASON_NOT_KEPT: skipped} if skipped else {}
    return values


def _account(
    training: dict[str, Any] | None,
    held_out: dict[str, Any] | None,
    total_tokens: int,
    unknown: int | None,
) -> SourceAccount:
    entry = training or {**(held_out or {}), "documents": 0, "samples": 0, "tokens": 0}
    tokens = entry["tokens"]
    return SourceAccount(
        name=entry["name"],
        weight=entry["weight"],
        documents=entry["documents"],
        held_out=held_out["documents"] if held_out else 0,
        skipped=sum_counts([entry["documents_skipped"]]),
        samples=entry["samples"],
        tokens=tokens,
        share=tokens / total_tokens,
        unknown_share=None if unknown is None or not tokens else unknown / tokens,
    )


SAMPLES_OF_A_WORKER = 16
"""Samples per worker in a batch whose size is not given."""
BERT_BASE_WORK = WorkModel(linear=6 * 768, quadratic=1)
"""Work of a BERT base layer. A block of width h costs 24 h^2 FLOPs per token and 4 h per pair of
tokens; both are divided by 4 h here."""
_GOOD_IMBALANCE = 1.01
_ADVICE_STEPS = 4
_ADVICE_DOUBLINGS = 6


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A data set as training would read it."""

    samples: int
    tokens: int
    stripes: int
    seq_len: int
    length_histogram: tuple[int, ...]
    """`length_histogram[s]`: number of samples of length s."""
    padding_to_seq_len: float
    """Share of padding if every sample were padded to `seq_len`."""
    workers: int
    batch_size: int
    balance: Balance
    schemes: tuple[SchemeBalance, ...]
    """The deal, followed by other schemes for the same batches."""
    advice: str | None
    """One line that recommends another batch size if that would balance the work better."""

    @property
    def padding_fraction(self) -> float:
        """Share of padding if every micro-batch were padded to its longest row."""
        return self.balance.padding_fraction

    @property
    def imbalance_max_over_mean(self) -> float:
        """Largest work of a rank over the mean, averaged over the steps."""
        return self.balance.imbalance_max_over_mean


def inspect(
    storage: Storage,
    *,
    workers: int,
    batch_size: int,
    tokens_per_micro_batch: int,
    work: WorkModel,
    steps: int = 20,
    window_stripes: int = 8,
    seed: int = 0,
    ranks_per_node: int = 8,
) -> Inspection:
    """Deal the first `steps` steps of a run with these settings, and return statistics.

    Args:
        storage: the data set.
        workers: number of data-parallel ranks.
        batch_size: samples per step, over all ranks.
        tokens_per_micro_batch: maximum number of tokens in a micro-batch.
        work: cost model of a row.
        steps: number of steps.
        window_stripes: number of stripes that are shuffled together.
        seed: seed of the run's order.
        ranks_per_node: number of ranks that could exchange rows inside their node.

    Raises:
        UserError: the data set does not exist, or does not suit these settings.
    """
    manifest = Manifest.read(storage)
    lengths = manifest.read_lengths(storage)
    problems = _setting_problems(manifest, int(lengths.max()), batch_size, tokens_per_micro_batch)
    if problems:
        raise UserError(*(f"{storage.uri()}: {problem}" for problem in problems))
    order = Order(
        num_samples=manifest.samples,
        stripe_size=manifest.stripe_size,
        window_stripes=window_stripes,
        seed=seed,
    )
    batches = list(batches_of_order(lengths, order, batch_size=batch_size, steps=steps))
    return _inspection(manifest, batches, workers, tokens_per_micro_batch, work, ranks_per_node)


def _inspection(
    manifest: Manifest,
    batches: list[Ints],
    workers: int,
    tokens_per_micro_batch: int,
    work: WorkModel,
    ranks_per_node: int,
) -> Inspection:
    balance = measure_balance(
        batches, workers=workers, tokens_per_micro_batch=tokens_per_micro_batch, work=work
    )
    return Inspection(
        samples=manifest.samples,
        tokens=manifest.tokens,
        stripes=manifest.stripes,
        seq_len=manifest.seq_len,
        length_histogram=manifest.length_histogram,
        padding_to_seq_len=1 - manifest.tokens / (manifest.samples * manifest.seq_len),
        workers=workers,
        batch_size=len(batches[0]),
        balance=balance,
        schemes=compare(
            batches,
            workers=workers,
            tokens_per_micro_batch=tokens_per_micro_batch,
            work=work,
            seq_len=manifest.seq_len,
            ranks_per_node=ranks_per_node,
        ),
        advice=advise(
            manifest.length_histogram,
            balance.imbalance_max_over_mean,
            workers=workers,
            batch_size=len(batches[0]),
            work=work,
        ),
    )


def _setting_problems(
    manifest: Manifest, longest: int, batch_size: int, tokens_per_micro_batch: int
) -> list[str]:
    """Return the reasons why these settings do not suit the data set."""
    problems = []
    if batch_size > manifest.samples:
        problems.append(
            f"a batch of {batch_size} is larger than the data set "
            f"({pluralize(manifest.samples, 'sample')})"
        )
    if longest > tokens_per_micro_batch:
        problems.append(
            f"its longest sample has {pluralize(longest, 'token')}, more than the "
            f"{tokens_per_micro_batch} of "
            "a micro-batch"
        )
    return problems


def advise(
    histogram: tuple[int, ...],
    imbalance: float,
    *,
    workers: int,
    batch_size: int,
    work: WorkModel,
) -> str | None:
    """Return one line on the batch size if ranks hold too few samples for equal work."""
    if imbalance <= _GOOD_IMBALANCE:
        return None
    problem = (
        f"{pluralize(batch_size / workers, 'sample', '.3g')} per worker: the slowest works "
        f"{imbalance:.3f} times "
        "the mean, for the longest sample rules; "
    )
    larger = max(batch_size, workers)
    for _ in range(_ADVICE_DOUBLINGS):
        larger *= 2
        balance = measure_balance(
            draw_batches(histogram, batch_size=larger, steps=_ADVICE_STEPS),
            workers=workers,
            # Room for a whole batch: the limit is no concern here.
            tokens_per_micro_batch=larger * len(histogram),
            work=work,
        )
        if balance.imbalance_max_over_mean <= _GOOD_IMBALANCE:
            return problem + (
                f"a batch of {larger} (accumulated where memory is short) gives "
                f"{balance.imbalance_max_over_mean:.3f}"
            )
    return problem + "use a larger batch or fewer workers"


def verify(storage: Storage) -> list[str]:
    """Read a whole data set, including held-out data, and return one line per problem.

    The result is empty if the data set is intact. Files are read one at a time.

    Raises:
        UserError: the data set does not exist, or its manifest cannot be read.
    """
    manifest = Manifest.read(storage)
    problems = _content_problems(storage, manifest)
    try:
        held_out = read_held_out(storage, manifest)
    except UserError as error:
        return [*problems, *error.problems]
    return problems + (_content_problems(storage.sub(HELD_OUT), held_out) if held_out else [])


def _content_problems(storage: Storage, manifest: Manifest) -> list[str]:
    """Return the problems of a data set's files."""
    problems, index_problems = [], list[str]()
    lengths: npt.NDArray[np.int32] | None = None
    try:
        lengths = manifest.read_lengths(storage)
    except UserError as error:
        index_problems += error.problems
    first = 0
    for entry in manifest.files:
        expected = None if lengths is None else lengths[first : first + entry.samples]
        first += entry.samples
        problem = file_problem(storage, entry)
        if problem := problem or _damage_of_file(storage, manifest, entry, expected):
            problems.append(problem)
    # The lengths file is checked twice, as a file and as an index.
    return list(dict.fromkeys(problems + index_problems))


def _damage_of_file(
    storage: Storage,
    manifest: Manifest,
    entry: FileEntry,
    lengths: npt.NDArray[np.int32] | None,
) -> str | None:
    """Return the problem of a file's bytes or samples, in one line."""
    where = storage.uri(entry.path)
    try:
        # The default limit of `read_bytes` is for JSON; shards may be larger.
        data = read_bytes(storage, entry.path, most=entry.bytes)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            return f"{where}: altered: its checksum is not the manifest's"
        # Lengths and tokenizer files hold no samples: their checksums suffice.
        if not entry.stripes:
            return None
        found = read_shard(data, storage, manifest, entry)["length"].to_numpy()
    except FileNotFoundError:
        return f"{where}: missing"
    except UserError as error:
        return str(error)
    if lengths is not None and not np.array_equal(found, lengths):
        return f"{where}: its lengths are not those in the index"
    return None
