"""Histories of runs, entry by entry, and folders of runs that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import DataSet, RunIdentity, read_identity, read_recipe, write_identity
from elastrata.step.records import StepRecord
from elastrata_pipelines.storage import Storage
from support.synthetic import tiny_recipe

Entry = dict[str, Any]
BATCH = 21
_RECORDED = {field.name for field in fields(StepRecord)}


def started(attempt: int, step: int, *, time: float = 0.0, **more: Any) -> Entry:
    return {
        "kind": "started",
        "attempt": attempt,
        "time": time,
        "step": step,
        "world_size": 2,
        **more,
    }


def stepped(attempt: int, step: int, *, time: float = 0.0, **more: Any) -> Entry:
    """A step of `BATCH` samples, as all before it."""
    return {
        "kind": "step",
        "attempt": attempt,
        "time": time,
        "step": step,
        "samples": BATCH * step,
        "tokens": 100 * step,
        "batch_samples": BATCH,
        "world_size": 2,
        "digest": f"{step:016x}",
        "loss": 4.0 / step,
        "seconds": 1.0,
        **more,
    }


def record(step: int) -> StepRecord:
    """The record of a step of a group of two."""
    plain = {key: value for key, value in stepped(1, step).items() if key in _RECORDED}
    zeros = dict.fromkeys(_RECORDED - plain.keys(), 0)
    nothing: dict[str, Any] = {
        "terms": {},
        "metrics": {},
        "layer_sparsity": {},
        "batch_tokens_by_source": {},
        "micro_batch_tokens_by_kind": {},
        "memory_by_stage": (),
        "mfu": None,
        "bubble": None,
        "micro_batch_tokens": None,
        "activation_checkpointing": None,
        "speeds": (),
        "slowest_rank": None,
        "time_imbalance": None,
    }
    return StepRecord(**{**zeros, **plain, **nothing})


def said(kind: str, attempt: int, *, time: float, **more: Any) -> Entry:
    """An entry of another kind."""
    return {"kind": kind, "attempt": attempt, "time": time, **more}


def write_run(
    folder: Path,
    entries: Iterable[Mapping[str, Any]],
    *,
    data: Path | str = "nowhere",
    **recipe_keys: Any,
) -> None:
    """A run's folder, with its history in one part per attempt."""
    run = Storage(str(folder))
    recipe = Recipe.model_validate(tiny_recipe(data, folder.parent, **recipe_keys))
    identity = RunIdentity(name=folder.name, data=(DataSet(url=str(data), fingerprint="none"),))
    write_identity(run, identity, recipe)
    by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for entry in entries:
        by_attempt.setdefault(entry["attempt"], []).append(entry)
    for attempt, lines in by_attempt.items():
        write_part(folder / "history" / f"{attempt:04d}-00000000.jsonl", lines)


def write_part(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def read_part(path: Path) -> list[Entry]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def kept_recipe(folder: Path) -> Recipe:
    """The recipe that the run in that folder was last continued with."""
    run = Storage(str(folder))
    identity = read_identity(run)
    assert identity is not None
    return read_recipe(run, identity)
