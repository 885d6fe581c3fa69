"""The fit of given weights to a recipe and its data: model, tensors, vocabulary and ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastrata.core.counterpart import Counterpart
from elastrata.core.first_weights import id_tables, sizes
from elastrata.recipe.begin_with import BeginConfig
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.preflight import TrainingData
from elastrata_pipelines.errors import nearest
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.format.manifest import TOKENIZER_DIR
from elastrata_pipelines.preparation.tokenizer import TokenizerFiles
from elastrata_pipelines.storage import Storage

_KEY = "begin_with.weights"
_NUMBER = re.compile(r"\d+")
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GivenTokenizer:
    """The tokenizer that weights were trained with, as far as it is known."""

    fingerprint: str
    ids: Mapping[str, int] | None
    """By token; None: there are no files of it."""


@dataclass(frozen=True, kw_only=True)
class GivenWeights:
    """Weights as they tell of themselves."""

    name: str
    """For messages: where they lie."""
    workload: str
    architecture: Mapping[str, Any]
    """As `Workload.architecture` has it."""
    sizes: Mapping[str, Shape]
    """By the names of `counterpart`."""
    counterpart: Counterpart = field(default_factory=Counterpart)
    """Where parameters of ours lie in them; by default under the same names."""
    num_ids: int
    tokenizer: GivenTokenizer | None
    """None: nobody knows."""


def data_tokenizer(data: Storage, manifest: Manifest) -> GivenTokenizer:
    """The tokenizer that a data set was prepared with."""
    path = f"{TOKENIZER_DIR}/tokenizer.json"
    has_files = any(entry.path == path for entry in manifest.files)
    files = TokenizerFiles(data.read(path).decode(), "{}") if has_files else None
    return GivenTokenizer(
        fingerprint=manifest.tokenizer_fingerprint, ids=files.ids if files else None
    )


def fit_problems(
    given: GivenWeights, begin: BeginConfig, recipe: Recipe, data: TrainingData
) -> list[str]:
    """A line for each reason why a recipe cannot begin with these weights."""
    workload = recipe.workload
    if workload.name != given.workload:
        return [f"workload.name: {workload.name}: expected {given.workload}, as {given.name} has"]
    ours = workload.architecture()
    lines = [
        f"workload.{key}: {ours.get(key)}: expected {value}, as {given.name} has"
        for key, value in given.architecture.items()
        if ours.get(key) != value and key not in begin.may_differ
    ]
    lines += [
        f"begin_with.may_differ: {key}: no such key{nearest(key, ours)}"
        for key in begin.may_differ
        if key not in ours
    ]
    lines = lines or [f"{_KEY}: {line}" for line in _tensor_problems(given, recipe, data)]
    return [*lines, *_vocabulary_problems(given, begin, data)]


def _tensor_problems(given: GivenWeights, recipe: Recipe, data: TrainingData) -> Iterator[str]:
    """Names first; shapes, where all names are right."""
    model = recipe.workload, data.vocabulary, data.seq_len
    ours, table = sizes(*model), given.counterpart
    expected = {table.origin(name).name: table.origin(name).shape(s) for name, s in ours.items()}
    expected |= {name: given.sizes.get(name, ()) for name in table.zeros(ours)}
    tables = {table.origin(name).name for name in id_tables(*model)}
    missing, extra = expected.keys() - given.sizes.keys(), given.sizes.keys() - expected.keys()
    if missing:
        hints = nearest(min(missing), extra)
        yield f"{given.name}: lacks {in_short(missing)}{hints}"
    if extra:
        yield f"{given.name}: has {in_short(extra)}, which the model has not"
    for name in sorted(expected.keys() & given.sizes.keys()):
        first = 1 if name in tables else 0
        if expected[name][first:] != given.sizes[name][first:]:
            yield f"{given.name}: {name} has shape {given.sizes[name]}, expected {expected[name]}"
        elif first and given.sizes[name][0] < given.num_ids:
            yield (
                f"{given.name}: {name} has {given.sizes[name][0]:,} rows, expected one for each of "
                f"{given.num_ids:,} ids"
            )


def in_short(names: Iterable[str]) -> str:
    """Names of tensors, sorted; those that differ in one number, such as a block's, as one:
    `blocks.{0..11}.norm.weight`."""
    by_form: dict[str, list[list[int]]] = {}
    for name in names:
        numbers = [int(number) for number in _NUMBER.findall(name)]
        by_form.setdefault(_NUMBER.sub("#", name), []).append(numbers)
    return ", ".join(_in_short(form, sorted(numbers)) for form, numbers in sorted(by_form.items()))


def _in_short(form: str, numbers: list[list[int]]) -> str:
    first, last = numbers[0], numbers[-1]
    is_range = len(first) == 1 < len(numbers) == last[0] - first[0] + 1
    if is_range:
        return form.replace("#", f"{{{first[0]}..{last[0]}}}")
    named = (_filled(form, one) for one in numbers)
    return ", ".join(named)


def _filled(form: str, numbers: list[int]) -> str:
    values = iter(numbers)
    return re.sub("#", lambda _: str(next(values)), form)


def _vocabulary_problems(
    given: GivenWeights, begin: BeginConfig, data: TrainingData
) -> Iterator[str]:
    num_ids, url = data.vocabulary.size, data.train.url
    if wrong := _other_ids(given.tokenizer, Storage(url), data.train.manifest):
        yield f"data.path: {url}: its tokenizer has other ids than that of {given.name}: {wrong}"
    elif num_ids < given.num_ids:
        yield (
            f"data.path: {url}: its tokenizer has {num_ids:,} ids, {given.name} {given.num_ids:,}: "
            "expected as many, or more"
        )
    elif num_ids > given.num_ids and not begin.extend_vocabulary:
        yield (
            f"begin_with.extend_vocabulary: false: the tokenizer of {url} has {num_ids:,} ids, "
            f"{given.name} {given.num_ids:,}: expected true, which draws the rows of new ones"
        )


def _other_ids(theirs: GivenTokenizer | None, data: Storage, manifest: Manifest) -> str:
    """The first tokens that have another id, or none; empty where all have their own, or nobody
    knows."""
    if theirs is None or theirs.fingerprint == manifest.tokenizer_fingerprint:
        return ""
    ours = data_tokenizer(data, manifest).ids
    if theirs.ids is None or ours is None:
        return f"its fingerprint is {manifest.tokenizer_fingerprint}, not {theirs.fingerprint}"
    moved = sorted(
        (number, token) for token, number in theirs.ids.items() if ours.get(token) != number
    )
    if not moved:
        return ""
    (number, token), more = moved[0], len(moved) - 1
    also = f" (and {more:,} more)" if more else ""
    return f"{token!r} is {ours.get(token)}, expected {number}{also}"
