"""The lengths of the samples that are measured: those of the data set, full, or a histogram's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastrata.recipe.data_spec import DataSpec
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.format import Manifest

DATA, FULL = "data", "full"
_FORMS = {"counts": 1, "length_histogram": 0}
"""Keys of a file that hold a histogram, and the length that the first entry counts."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Which lengths samples have."""

    name: str
    """`data`, `full`, or the file's name."""
    histogram: tuple[int, ...] | None
    """`histogram[s]`: number of samples of s tokens, up to the longest; they are drawn from it.
    None: samples and their order are those of the data set."""


def choose_lengths(wanted: str | None, *, seq_len: int, prepared: bool) -> Lengths:
    """The lengths that `--lengths` names.

    Args:
        wanted: `data`, `full`, or a JSON file; None: `data` where there is a data set, else `full`.
        seq_len: tokens of a full sample.
        prepared: whether there is a data set.

    Raises:
        UserError: no such file, or no histogram in it.
    """
    name = wanted or (DATA if prepared else FULL)
    if name == DATA:
        return Lengths(name=DATA, histogram=None)
    if name == FULL:
        return Lengths(name=FULL, histogram=(*[0] * seq_len, 1))
    return Lengths(name=Path(name).name, histogram=read_histogram(name))


def read_histogram(path: str) -> tuple[int, ...]:
    """The histogram in a JSON file: entry s is the number of samples of s tokens.

    Raises:
        UserError: there is no such file, or it is not of the form `{"counts": [...]}`, the first
            entry for length 1, or `{"length_histogram": [...]}`, the first for length 0, as in a
            data set's manifest.
    """
    where = f"--lengths: {path}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        hint = nearest(path, (DATA, FULL))
        raise UserError(
            f"{where}: expected data, full or a JSON file{hint} ({error.strerror})"
        ) from None
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None
    key = next((key for key in _FORMS if isinstance(content, dict) and key in content), None)
    if key is None:
        raise UserError(
            f"{where}: expected an object with a list 'counts' (samples of 1, 2, 3... tokens) or "
            "'length_histogram' (of 0, 1, 2...)"
        )
    return _checked(content[key], f"{where}: {key}", first_length=_FORMS[key])


def _checked(counts: Any, where: str, *, first_length: int) -> tuple[int, ...]:
    if not isinstance(counts, list):
        raise UserError(f"{where}: expected a list of numbers of samples")
    histogram = [0] * first_length + counts
    for length, count in enumerate(histogram):
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise UserError(
                f"{where}: {json.dumps(count)} samples of length {length}: expected whole numbers "
                "of at least 0"
            )
    longest = max((length for length, count in enumerate(histogram) if count), default=0)
    if not longest or histogram[0]:
        raise UserError(f"{where}: expected at least one sample, and none of length 0")
    return tuple(histogram[: longest + 1])


def check_fits(recipe: Recipe, spec: DataSpec, name: str, histogram: tuple[int, ...]) -> None:
    """Makes sure that the recipe's model and micro-batches can take such samples.

    Args:
        recipe: what would train on them.
        spec: what they are made of.
        name: of the lengths, for the message.
        histogram: `histogram[s]` samples have s tokens, up to the longest.

    Raises:
        UserError: one line for each reason why they cannot.
    """
    longest = len(histogram) - 1
    problems = recipe.workload.problems(_manifest(spec, histogram))
    most = recipe.micro_batch_tokens
    if most != "auto" and longest > most:
        problems.append(
            f"micro_batch_tokens: {most}: --lengths {name} has samples of "
            f"{longest} tokens; expected at least that"
        )
    if problems:
        raise UserError(*problems)


def _manifest(spec: DataSpec, histogram: tuple[int, ...]) -> Manifest:
    """The manifest of such a data set, as far as a workload looks at it."""
    return Manifest(
        samples=sum(histogram),
        tokens=sum(length * count for length, count in enumerate(histogram)),
        stripes=0,
        stripe_size=1,
        seq_len=len(histogram) - 1,
        seed=0,
        packing="none",
        pairs=spec.pairs,
        token_dtype="uint32",
        length_histogram=histogram,
        vocabulary=spec.vocabulary,
        tokenizer_fingerprint="",
        sources=(),
        files=(),
    )
