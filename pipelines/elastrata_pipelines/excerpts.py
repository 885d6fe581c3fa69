"""Excerpts: some samples of a data set, decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from elastrata_pipelines.checked_json import read_bytes, reason
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest, read_stripes
from elastrata_pipelines.format.manifest import TOKENIZER_DIR
from elastrata_pipelines.payload import StepLayout, decode, encode
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """One sample as text, special tokens included."""

    sample_id: int
    tokens: int
    parts: list[str]
    """The documents in it, or the two halves of a pair."""
    is_next: bool | None
    """Whether the second text of a pair follows the first."""
    seen: str | None = None
    """The text that a model is shown of it in the first epoch; None where nobody has asked."""


def some_rows(storage: Storage, manifest: Manifest, count: int) -> Rows:
    """So many samples, or all, spread over the first stripe: short ones and long ones.

    Raises:
        UserError: a shard cannot be read.
    """
    (stripe,) = read_stripes(storage, manifest, [0])
    count = min(count, stripe.num_rows)
    table = stripe.take(np.arange(count) * stripe.num_rows // count)
    layout = StepLayout(step=1, cuts=[0, count], imbalance=1.0)
    (step,) = decode(encode(table, np.zeros(count, np.int64), [layout]), manifest.token_dtype)
    return step.rows


def excerpts(storage: Storage, rows: Rows, seen: Sequence[int] | None = None) -> list[Excerpt]:
    """Rows as text, by the tokenizer that the data set brings.

    Args:
        storage: the data set.
        rows: some of its samples.
        seen: the ids that a model is shown of them, end to end.

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
    except Exception as error:  # tokenizers raises this very class
        raise UserError(f"{where}: not a tokenizer ({reason(error)})") from None
