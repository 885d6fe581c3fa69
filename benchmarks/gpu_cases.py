"""The cases of a GPU suite: rows of a table, each measured of each model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from clip_overlap import profiled_clip
from padded_bert import PaddedBert, attention_by, padded_attention, padded_recipe
from processes import apart

from elastrata.bench.samples import bench_samples
from elastrata.bench.step import measure_steps
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError

FULL, NATURAL = "full", "natural"
OUT_OF_MEMORY = "out of memory"
Case = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case of every model of a suite."""

    overrides: tuple[str, ...]
    """The recipe's changes."""
    lengths: str = FULL
    """The samples' lengths: FULL, or NATURAL, those of `--lengths`."""
    ways: tuple[str, ...] = ()
    """Ways of checkpointing activations: the first that fits into memory counts."""
    is_of_one: bool = False
    """Whether one model is enough: the largest that should fit beside its optimizer into 80 GB."""
    is_padded: bool = False
    is_traced: bool = False
    """Whether clipping is looked at in a profile, too."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Said of the case beside what its recipe has."""
    beside: Callable[[Case], Case] = lambda case: case
    """Adds what is published, or aimed at."""


Part = Sequence[Row] | Callable[["Bench"], Any]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The measurements of some models, part by part."""

    models: tuple[str, ...]
    tiny_models: tuple[str, ...]
    parts: Mapping[str, Part]
    usual: tuple[str, ...] = ()
    """Overrides of all recipes."""
    tiny: tuple[str, ...]
    """Overrides that make models tiny."""
    tokens: int | None = None
    """Tokens of a step; None: as many as the recipe says."""
    warm_up: int
    steps: int
    one: str = ""
    """The model of rows that are of one."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Said once, in the result."""


class Bench:
    """A suite as the arguments have it."""

    def __init__(self, suite: Suite, arguments: argparse.Namespace) -> None:
        self._suite, self.is_tiny = suite, arguments.tiny
        self.models = suite.tiny_models if self.is_tiny else suite.models
        if arguments.models:
            self.models = tuple(arguments.models.split(","))
        self._chosen = arguments.overrides
        self._lengths = {FULL: FULL, NATURAL: arguments.lengths}
        # On a CPU, compilation takes minutes and is not what is tried.
        self._last = ("compile=false",) if arguments.device == "cpu" else ()
        self.run = _here if arguments.device == "cpu" else apart

    @property
    def histogram(self) -> str:
        return str(self._lengths[NATURAL])

    def overrides(self, model: str, *more: str) -> list[str]:
        suite = self._suite
        of_size = suite.tiny if self.is_tiny else ()
        if suite.tokens and not self.is_tiny:
            seq_len = load_recipe(model, []).data.prepare.seq_len
            of_size = (f"batch_size={suite.tokens // seq_len}",)
        return [*suite.usual, *of_size, *self._chosen, *more, *self._last]

    def part(self, part: Part) -> Any:
        if callable(part):
            return part(self)
        return [self._first_that_fits(model, row) for row in part for model in self._models_of(row)]

    def _models_of(self, row: Row) -> Sequence[str]:
        if not row.is_of_one:
            return self.models
        return (self._suite.one if self._suite.one in self.models else self.models[-1],)

    def _first_that_fits(self, model: str, row: Row) -> Case:
        case: Case = {}
        for way in row.ways or (None,):
            checkpointing = (f"activation_checkpointing={way}",) if way else ()
            case = self._case(model, row, *checkpointing)
            if case.get("error") != OUT_OF_MEMORY:
                break
        return case if "error" in case else row.beside(case)

    def _case(self, model: str, row: Row, *more: str) -> Case:
        recipe = load_recipe(model, self.overrides(model, *row.overrides, *more))
        lengths = self._lengths[row.lengths]
        counts = (1, 2) if self.is_tiny else (self._suite.warm_up, self._suite.steps)
        if row.is_padded:
            recipe = padded_recipe(recipe, lengths)
        case = {
            **{"model": model, "layers": recipe.workload.num_layers, "lengths": row.lengths},
            **{"precision": recipe.precision, "compile": recipe.compile},
            "activation_checkpointing": recipe.activation_checkpointing,
            "micro_batch_tokens": recipe.micro_batch_tokens,
            **row.facts,
            **self.run(measured, recipe, lengths, *counts),
        }
        if row.is_traced:
            case["trace"] = self.run(profiled_clip, recipe, lengths)
        print(json.dumps(_short(case)), flush=True)
        return case


def measured(recipe: Recipe, lengths: str, warm_up: int, steps: int) -> Case:
    """`elastrata bench step`, or why it failed."""
    is_padded = isinstance(recipe.workload, PaddedBert)
    try:
        samples = bench_samples(recipe, lengths, steps=warm_up + steps)
        with attention_by(padded_attention) if is_padded else nullcontext():
            figures = asdict(measure_steps(recipe, samples, warm_up=warm_up))
    except torch.OutOfMemoryError:
        return {"error": OUT_OF_MEMORY}
    except (RuntimeError, UserError) as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    del figures["mfu_convention"]
    return figures


def _here(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _short(case: Case) -> Case:
    """A line of a case, while others are measured."""
    rates = ("sequences_per_second", "tokens_per_second", "mfu", "seconds")
    medians = {key: case[key]["median"] for key in rates if case.get(key)}
    facts = {key: value for key, value in case.items() if isinstance(value, str | bool)}
    return {**facts, **medians, "peak_memory_bytes": case.get("peak_memory_bytes")}
