"""Damaged folders of sweeps: each is refused in lines that name the file, or told, or means what it
meant. Never a raw exception, a hang, or silence.

One trial put in the place of another is not among the damages: a history does not name its run.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from itertools import filterfalse, islice
from pathlib import Path
from typing import Any

import pytest

from elastrata.recipe.recipe import Recipe
from elastrata.run.claim import TRIALS
from elastrata.run.folder import DataSet, RunIdentity, write_identity
from elastrata.run.history import HistoryWriter
from elastrata.sweeps.config import SweepConfig
from elastrata.sweeps.journal import Report, report_entry
from elastrata.sweeps.launch import check_journal
from elastrata.sweeps.result import (
    JOURNAL,
    check_same_sweep,
    read_result,
    sweep_digest,
    write_sweep,
)
from elastrata.sweeps.trial import RunPast
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from support.histories import record
from support.mutations import Mutation, mutated, mutations, quick, seeds
from support.synthetic import tiny_recipe
from support.verdict import read_or_refused

MUTATIONS, STEPS = quick(220), 3
CONFIG = SweepConfig.model_validate(
    {"name": "s", "recipe": "r.yaml", "space": {"optimizer.lr": {"uniform": [0.1, 0.5]}}}
)
Meaning = dict[str, Any]


def _recipe(folder: Path) -> Recipe:
    return Recipe.model_validate(tiny_recipe("nowhere", folder, steps=STEPS))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep of three trials, one of which failed, launched twice."""
    path = tmp_path_factory.mktemp("sweeps") / "s"
    folder, recipe = Storage(str(path)), _recipe(path.parent)
    write_sweep(folder, CONFIG, recipe)
    for launch, trials in ((1, ("0000", "0001")), (2, ("0002",))):
        journal = HistoryWriter(folder.sub(JOURNAL), launch, pytest.fail)
        journal.add("launched", {"mlflow_run_id": "m", "sweep_sha256": sweep_digest(folder)})
        for trial in trials:
            _tried(journal, folder.sub(TRIALS, trial), trial, recipe)
    return path


def _tried(journal: HistoryWriter, run: Storage, trial: str, recipe: Recipe) -> None:
    values = {"optimizer.lr": 0.1 + int(trial) / 10}
    journal.add("suggested", {"trial": trial, "values": values})
    data = (DataSet(url="nowhere", fingerprint="none"),)
    write_identity(run, RunIdentity(name=trial, data=data), recipe)
    writer = HistoryWriter(run.sub("history"), 1, pytest.fail)
    writer.add("started", {"step": 0, "world_size": 1, "state": "new"})
    for step in range(1, STEPS + 1):
        writer.add("step", record(step).to_dict())
    writer.add("evaluated", {"step": STEPS, "eval/loss": 1.0 + int(trial)})
    writer.flush()
    report = Report(
        step=STEPS, samples=63, tokens=300, seconds=3.0, metrics={"eval/loss": 1.0 + int(trial)}
    )
    journal.add("reported", report_entry(trial, report))
    state = "failed" if trial == "0001" else "finished"
    journal.add("concluded", {"trial": trial, "state": state, "text": ""})
    journal.flush()


def continued(folder: Path) -> tuple[Meaning, list[str]]:
    """All that `sweep` does with the folder before its trials start, and what trials read first."""
    storage = Storage(str(folder))
    check_same_sweep(storage, CONFIG, _recipe(folder.parent))
    said = list(check_journal(storage, CONFIG))
    pasts = {}
    for trial in ("0000", "0001", "0002"):
        past = RunPast.of(storage.sub(TRIALS, trial), said.append)
        pasts[trial] = past.curves(), list(past.reports()), past.unreported()
    return pasts, said


def read_back(folder: Path) -> tuple[Meaning, list[str]]:
    """The sweep, as `read_result` gives it."""
    found = read_result(str(folder))
    left = {key: v for key, v in found.summary().items() if key not in ("sweep", "problems")}
    return {**left, "values": found.best_values}, list(found.problems)


READERS: tuple[Callable[[Path], tuple[Meaning, list[str]]], ...] = (continued, read_back)


def _replaces_a_trial(mutation: Mutation) -> bool:
    return bool(re.match(r"trials/\d+(/.*)?: a copy of trials/", mutation.name))


@pytest.mark.parametrize("seed", seeds())
def test_a_damaged_sweep_is_refused_or_told_or_means_what_it_meant(sweep: Path, seed: int) -> None:
    whole = {}
    with mutated(sweep, Mutation("nothing", lambda copy: None)) as copy:
        for read in READERS:
            whole[read], said = read(copy)
            assert not said
    drawn = filterfalse(_replaces_a_trial, mutations(sweep, random.Random(seed)))
    for mutation in islice(drawn, MUTATIONS):
        with mutated(sweep, mutation) as copy:
            for read in READERS:
                case = f"seed {seed}: {mutation.name}: {read.__name__}"
                found = read_or_refused(
                    partial(read, copy), case, str(copy), "history", "journal", "exists;"
                )
                if found is not None and not found[1]:
                    assert found[0] == whole[read], f"{case}: silent"


def test_the_journal_in_the_place_of_a_trials_history_is_told(sweep: Path, tmp_path: Path) -> None:
    copy = tmp_path / "s"
    shutil.copytree(sweep, copy)
    shutil.rmtree(copy / TRIALS / "0001" / "history")
    shutil.copytree(copy / JOURNAL, copy / TRIALS / "0001" / "history")
    _, said = continued(copy)
    assert any("0001/history: not the history of a run, but" in line for line in said)


def test_a_trials_history_in_the_journals_place_is_refused(sweep: Path, tmp_path: Path) -> None:
    copy = tmp_path / "s"
    shutil.copytree(sweep, copy)
    shutil.rmtree(copy / JOURNAL)
    shutil.copytree(copy / TRIALS / "0001" / "history", copy / JOURNAL)
    with pytest.raises(UserError, match=r"journal: no launch is recorded"):
        read_result(str(copy))
