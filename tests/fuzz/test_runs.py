"""Damaged folders of runs: each is refused in lines that name the file, or told, or gone on from
with a word, or means what it meant. Never a raw exception, a hang, or silence."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from elastrata.checkpoints.commit import MARKER, file_problems, list_commits
from elastrata.checkpoints.dcp_reader import read_metadata
from elastrata.driver.driver import is_finished
from elastrata.driver.launch import check_run
from elastrata.driver.recorder import record_missed_events
from elastrata.parallel.mesh import lone_group
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.audit import audit
from elastrata.run.consistency import choose_commit
from elastrata.run.folder import read_identity, read_recipe
from elastrata.run.history import HistoryWriter, part_names, restore_history
from elastrata.run.ownership import own_run
from elastrata.run.status import status
from elastrata.sweeps.trial import LoneTrial
from elastrata.tracking.tracker import SilentTracker
from elastrata.trainer.resume import find_resume_point
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from support.clocks import BEGAN, Life, check_status, write_history
from support.histories import write_run
from support.mutations import Mutation, mutated, mutations, seeds
from support.synthetic import tiny_recipe, write_data_set
from support.verdict import read_or_refused

MUTATIONS, STEPS, EVERY = 40, 12, 4
LIVES, LOSSES = 20, 8
Meaning = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def no_time_passes() -> Iterator[None]:
    """Let a driver wait for the thread that gives its run back, and let only flushes write parts of
    a history, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elastrata.run.ownership._CLOSING_SECONDS", 300.0)
        patch.setattr(history, "PART_SECONDS", float("inf"))
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("trained")
    write_data_set(folder / "data", samples=120)
    write_data_set(folder / "evaluated", samples=20, seed=1)
    values = tiny_recipe(
        folder / "data",
        folder / "runs",
        steps=STEPS,
        evaluation={"every": EVERY, "samples": 8, "path": str(folder / "evaluated")},
        checkpoint={"every": STEPS},
    )
    return Recipe.model_validate(values)


@pytest.fixture(scope="module")
def trained(recipe: Recipe) -> Path:
    """The folder of a run that was left once and gone on with, with a driver's part in it."""
    run = Storage(str(Path(recipe.storage) / "one"))
    threads = torch.get_num_threads()
    with lone_group(torch.device("cpu")), own_run(run, lost=pytest.fail, beat_seconds=0.05):
        first = LoneTrial(recipe, run)
        first.report()
        first.save()
        first.report()
        first.close()
        driver = HistoryWriter(run.sub("history"), 1, pytest.fail, writer="d")
        driver.add("fault", {"text": "rank 0 was killed", "ranks": [0]})
        driver.flush()
        second = LoneTrial(recipe, run)
        while second.report().state == "running":
            second.save()
        second.close()
        driver.add("ended", {"status": "FINISHED", "text": ""})
        driver.flush()
    torch.set_num_threads(threads)
    return Path(run.url)


def told(run: Storage, recipe: Recipe) -> tuple[Meaning, list[str]]:
    """What `status` says, and what it warns of."""
    found = status(run).to_dict()
    return without_place(found), found["problems"]


def audited(run: Storage, recipe: Recipe) -> tuple[Meaning, list[str]]:
    found = audit(run)
    meaning = {**found.to_dict(), "done": [dict(step) for step in found.steps]}
    return without_place(meaning), [line for line in (*found.problems, found.data.text) if line]


def taken_over(run: Storage, recipe: Recipe) -> tuple[Meaning, list[str]]:
    """All that `train` does with the folder before its workers start."""
    said: list[str] = []
    identity = read_identity(run)
    data_sets = identity.data if identity else ()
    check_run(run, recipe, data_sets, None, said.append)
    with own_run(run, lost=pytest.fail, warn=said.append, beat_seconds=0.05):
        for commit in list_commits(run.sub("checkpoints"))[:1]:
            restore_history(run.sub("history"), commit)
        newest = find_resume_point(run, None, said.append)
        finished = is_finished(run, steps=STEPS, target=None)
        entries = history.read_entries(run.sub("history"))
        record_missed_events(SilentTracker(), entries, [])
    place = replace(newest, commit=_place(newest.commit))
    meaning = {"newest": place, "finished": finished, "steps": history.effective_steps(entries)}
    return meaning, said


def exported(run: Storage, recipe: Recipe) -> tuple[Meaning, list[str]]:
    """All that `export` reads of a run."""
    if (identity := read_identity(run)) is None:
        raise UserError(f"{run.uri()}: no run here")
    checkpoints, commit = run.sub("checkpoints"), choose_commit(run, "newest")
    if damaged := file_problems(checkpoints, commit):
        raise UserError(f"{checkpoints.uri(commit.folder)}: {damaged[0]}")
    held = read_metadata(checkpoints, commit).state_dict_metadata
    named = commit.model_copy(update={"folder": _place(commit.folder)})
    return {"workload": read_recipe(run, identity).workload, "commit": named, "held": held}, []


def _place(folder: str | None) -> str:
    """A commit's folder without its random part: a copy under another one is the same state, and
    which of the two counts is as random as their names."""
    return (folder or "none").rpartition("-")[0]


def without_place(meaning: Meaning) -> Meaning:
    """The same without what differs from copy to copy, and without what is a word about it."""
    left = {k: v for k, v in meaning.items() if k not in ("run", "seen", "problems", "chain")}
    if left.get("checkpoint"):
        left["checkpoint"] = left["checkpoint"]["step"]
    return left


def _lost_its_marker(copy: Path, trained: Path, reader: str) -> bool:
    """Whether `export` sees a checkpoint less, as one without a marker never was one."""
    left, before = (
        {path.parent.name for path in run.glob(f"checkpoints/*/{MARKER}")}
        for run in (copy, trained)
    )
    return reader == "export" and bool(before - left)


def _lost_a_last_part(copy: Path, trained: Path) -> bool:
    """Whether one part of the history is gone, and none after it of the same attempt and writer.

    Parts are not linked to one another, so that nothing tells of it.
    """
    try:
        left, before = (set(part_names(Storage(str(run / "history")))) for run in (copy, trained))
    except UserError:
        return False
    return any(before - left == {part} and part.next not in before for part in before)


READERS: dict[str, Callable[[Storage, Recipe], tuple[Meaning, list[str]]]] = {
    "status": told,
    "audit": audited,
    "train": taken_over,
    "export": exported,
}


@pytest.mark.parametrize("seed", seeds())
def test_a_damaged_run_is_refused_or_told_or_means_what_it_meant(
    trained: Path, recipe: Recipe, seed: int
) -> None:
    whole = {}
    with mutated(trained, Mutation("nothing", lambda copy: None)) as copy:
        for name, read in READERS.items():
            whole[name], said = read(Storage(str(copy)), recipe)
            assert not said, name
    rng = random.Random(seed)
    for mutation in islice(mutations(trained, rng), MUTATIONS):
        with mutated(trained, mutation) as copy:
            for name, read in READERS.items():
                case = f"seed {seed}: {mutation.name}: {name}"
                run = Storage(str(copy))
                found = read_or_refused(
                    partial(read, run, recipe), case, str(copy), "history", "exists;"
                )
                lost = _lost_its_marker(copy, trained, name) or _lost_a_last_part(copy, trained)
                if found is not None and not found[1] and not lost:
                    assert found[0] == whole[name], f"{case}: silent"


@pytest.mark.parametrize("seed", seeds())
def test_a_run_whose_clocks_jump_adds_up(tmp_path: Path, seed: int) -> None:
    """Histories of runs that were killed, resized, stopped and continued, while the wall clocks of
    one host or of three were set back and forth; with and without monotonic readings."""
    for number in range(LIVES):
        rng = random.Random(f"{seed}-{number}")
        case = f"seed {seed}, life {number}"
        life = Life(rng, hosts=rng.choice((1, 3)), has_readings=rng.random() < 0.7)
        folder = tmp_path / str(number)
        write_run(folder, [], steps=99)
        run = Storage(str(folder))
        write_history(life, run.sub("history"))
        found = read_or_refused(partial(status, run), case, str(folder))
        assert found is not None, case
        assert not found.problems, case
        check_status(found)
        if life.entries[-1]["kind"] == "ended" and life.has_readings:
            ends = {"KILLED": "stopped", "FAILED": "failed"}
            assert found.state == ends[life.entries[-1]["status"]], case
        elif life.has_readings:
            assert found.state == "silent", (case, BEGAN)
        if found.steps:
            read_or_refused(partial(audit, run), case, str(folder), "history")


def _lose(copy: Path, rng: random.Random) -> tuple[str, list[str]]:
    """What is done to the checkpoints of a copy, and the folders that must be named."""
    folders = sorted(path for path in (copy / "checkpoints").iterdir() if path.is_dir())
    how = rng.choice(("all", "some", "the whole folder", "a marker", "a file", "a cut file"))
    if how == "the whole folder":
        shutil.rmtree(copy / "checkpoints")
        return how, [path.name for path in folders]
    lost = folders if how == "all" else rng.sample(folders, rng.randint(1, len(folders)))
    for path in lost:
        files = sorted(file for file in path.iterdir() if file.name != MARKER)
        file = path / MARKER if how == "a marker" else rng.choice(files)
        if how in ("all", "some"):
            shutil.rmtree(path)
        elif how == "a cut file" and file.stat().st_size:
            os.truncate(file, rng.randrange(file.stat().st_size))
        else:
            file.unlink()
    return how, [path.name for path in lost]


@pytest.mark.parametrize("seed", seeds())
def test_checkpoints_that_are_deleted_are_named(trained: Path, recipe: Recipe, seed: int) -> None:
    for number in range(LOSSES):
        rng = random.Random(f"{seed}-{number}")
        with mutated(trained, Mutation("nothing", lambda copy: None)) as copy:
            how, lost = _lose(copy, rng)
            for read in (told, audited):
                case = f"seed {seed}, case {number}: {how}: {read.__name__}"
                found = read_or_refused(partial(read, Storage(str(copy)), recipe), case, str(copy))
                assert found is not None, case
                for folder in lost:
                    assert any(folder in line for line in found[1]), f"{case}: {folder}: silent"
