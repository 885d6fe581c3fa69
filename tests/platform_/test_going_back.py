"""A run with checkpoints never begins anew by itself: what contradicts them is named, and a user
can go back to any of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from elastrata.checkpoints.commit import MARKER, METADATA, Commit, FileRecord, FolderName
from elastrata.cli.main import run as run_command
from elastrata.parallel.mesh import lone_group
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.audit import audit, sequence_problems
from elastrata.run.consistency import (
    SET_ASIDE,
    check_continuation,
    find_commit,
    go_back,
    read_evidence,
)
from elastrata.run.folder import RunIdentity, write_identity
from elastrata.run.history import HistoryWriter, unwritten_extra
from elastrata.run.status import status
from elastrata.run.timeline import recoveries
from elastrata.sweeps.trial import LoneTrial
from elastrata.trainer.preflight import find_training_data
from elastrata.trainer.resume import find_resume_point
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from support.histories import read_part, record, started, stepped, write_part
from support.synthetic import tiny_recipe, write_data_set


@pytest.fixture(autouse=True)
def only_flushes_write_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no part because time has passed: the names of parts would depend on the machine."""
    monkeypatch.setattr(history, "PART_SECONDS", float("inf"))


def commit(run: Storage, attempt: int, step: int, writer: HistoryWriter | None = None) -> str:
    folder, data = str(FolderName(attempt, step, "abcdef")), b"a state"
    listed = FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    made = Commit(
        folder=folder,
        step=step,
        samples=step,
        tokens=step,
        extra=unwritten_extra(writer) if writer else {},
        files={METADATA: listed},
    )
    run.write(data, "checkpoints", folder, METADATA)
    run.write(made.to_json(), "checkpoints", folder, MARKER)
    return folder


def attempt(run: Storage, number: int, start: int, last: int) -> HistoryWriter:
    """A group of workers that did steps, in two parts, and saved after each."""
    writer = HistoryWriter(run.sub("history"), number, pytest.fail)
    writer.add("started", {"step": start, "world_size": 1})
    for step in range(start + 1, last + 1):
        writer.add("step", record(step).to_dict())
        if step in (start + 2, last):
            writer.flush()
            commit(run, number, step, writer)
    writer.flush()
    return writer


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    storage = Storage(str(tmp_path / "run"))
    attempt(storage, 1, 0, 5)
    attempt(storage, 2, 5, 8)
    return storage


def old_run(folder: Path) -> Storage:
    """The same by an earlier version: without seals, and with commits that know of no part."""
    storage = Storage(str(folder))
    steps = [stepped(1, number) for number in range(1, 6)]
    write_part(folder / "history" / "0001-00000000.jsonl", [started(1, 0), *steps])
    for step in (2, 5):
        commit(storage, 1, step)
    return storage


def place(run: Storage) -> tuple[str | None, int]:
    newest = find_resume_point(run, None, pytest.fail)
    return newest.commit, newest.start.step


def test_a_stray_part_is_named_and_set_aside(run: Storage) -> None:
    folder = Path(run.path("history"))
    sound = place(run)
    stray = folder / "100000-00000000.jsonl"
    shutil.copy(folder / "0001-00000000.jsonl", stray)
    assert place(run) == sound, "an attempt in mid-run does not go by it"
    with pytest.raises(UserError) as raised:
        check_continuation(run, pytest.fail)
    (line,) = raised.value.problems
    assert line.startswith(f"{stray}: not of this history: a copy of 0001-00000000.jsonl")
    assert "elastrata train ... --from 8" in line
    (problem,) = read_evidence(run).problems
    assert problem in line
    told: list[str] = []
    go_back(run, find_commit(run, "8"), told.append)
    assert told[0].startswith(f"{stray}: ")
    assert (folder / SET_ASIDE / stray.name).exists()
    assert read_evidence(run).problems == ()
    assert place(run) == sound
    check_continuation(run, pytest.fail)


@pytest.mark.parametrize("number", [2, 100_000])
def test_a_history_of_old_that_contradicts_all_checkpoints(tmp_path: Path, number: int) -> None:
    run = old_run(tmp_path / "run")
    write_part(tmp_path / "run" / "history" / f"{number:04d}-00000000.jsonl", [started(number, 0)])
    for look in (lambda: check_continuation(run, pytest.fail), lambda: place(run)):
        with pytest.raises(UserError) as raised:
            look()
        assert len(raised.value.problems) == 2
        assert f"attempt {number} resumed from step 0" in raised.value.problems[0]
        assert "--from 5 resumes from this one" in raised.value.problems[0]
    go_back(run, find_commit(run, "5"), pytest.fail)
    assert place(run)[1] == 5
    later = HistoryWriter(run.sub("history"), number + 2, pytest.fail)
    later.add("started", {"step": 5, "world_size": 1})
    later.flush()
    assert place(run)[1] == 5, "also where the next group is lost before its first checkpoint"
    steps = history.effective_steps(history.read_entries(run.sub("history")))
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]


def test_going_back_is_in_the_history(run: Storage) -> None:
    named = FolderName(1, 2, "abcdef")
    assert find_commit(run, str(named)) == find_commit(run, "2")
    go_back(run, find_commit(run, "2"), pytest.fail)
    assert place(run) == (str(named), 2)
    attempt(run, 4, 2, 6)
    assert place(run)[1] == 6
    found = read_evidence(run)
    assert found.problems == ()
    assert [one.place for one in found.current_commits] == [(4, 6), (4, 4), (1, 2)]
    entries = found.history.entries
    assert sequence_problems(entries) == []
    steps = history.effective_steps(entries)
    (recovery,) = [one for one in recoveries(entries) if one.attempt == 4]
    assert (recovery.cause, recovery.steps_rolled_back) == ("returned", 6)
    assert [(step["step"], step["attempt"]) for step in steps] == [
        *((step, 1) for step in (1, 2)),
        *((step, 4) for step in (3, 4, 5, 6)),
    ]


def test_a_trained_run_goes_on_from_where_it_was_told(tmp_path: Path) -> None:
    write_data_set(tmp_path / "data", samples=120)
    write_data_set(tmp_path / "evaluated", samples=20, seed=1)
    values = tiny_recipe(
        tmp_path / "data",
        tmp_path,
        steps=12,
        evaluation={"every": 4, "samples": 8, "path": str(tmp_path / "evaluated")},
        checkpoint={"every": 4},
    )
    recipe, run = Recipe.model_validate(values), Storage(str(tmp_path / "run"))
    losses = []
    threads = torch.get_num_threads()
    with lone_group(torch.device("cpu")):
        for told in (0, 8):
            if told:
                go_back(run, find_commit(run, str(told)), pytest.fail)
            trial = LoneTrial(recipe, run, told=told)
            while trial.report().state == "running":
                trial.save()  # else a save that is slow puts off the next one
            trial.close()
            found = audit(run)
            assert found.problems == ()
            losses.append([step["loss"] for step in found.steps])
    torch.set_num_threads(threads)
    assert losses[0] == losses[1]
    assert [(one.step, one.rolled_back) for one in found.attempts] == [(0, 4), (8, 0)]


def test_a_wrong_name_is_told_with_the_nearest(run: Storage) -> None:
    with pytest.raises(UserError, match=r"--from: 000000002-0001-abcdee: .*did you mean '0000000"):
        find_commit(run, "000000002-0001-abcdee")
    with pytest.raises(UserError, match="one of the steps 2, 5, 7, 8, or the name of a folder"):
        find_commit(run, "6")
    Path(run.path("checkpoints", str(FolderName(1, 2, "abcdef")), METADATA)).write_text(
        "b state", encoding="utf-8"
    )
    with pytest.raises(UserError, match=r"--from: .*\.metadata is altered"):
        find_commit(run, "2")


def test_a_missing_part_is_noticed(run: Storage) -> None:
    lost = Path(run.path("history", "0001-00000000.jsonl"))
    lost.unlink()
    (problem,) = read_evidence(run).history.problems
    assert problem == f"{lost}: missing, although its writer has later parts"
    said: list[str] = []
    check_continuation(run, said.append)
    assert problem in said, "it goes on, and says so"


def test_a_history_that_ends_before_the_newest_checkpoint(run: Storage) -> None:
    for name in ("0002-00000000.jsonl", "0002-00000001.jsonl"):
        Path(run.path("history", name)).unlink()
    (problem,) = read_evidence(run).problems
    assert ": ends with step 5, before checkpoint 000000008-0002-" in problem


def test_an_edited_line_is_noticed(run: Storage) -> None:
    part = Path(run.path("history", "0001-00000001.jsonl"))
    entries = read_part(part)
    entries[0]["loss"] += 0.5
    part.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    lines = read_evidence(run).problems
    assert any("altered: its lines do not match its seal" in line for line in lines)


def test_a_history_of_old_has_no_checksums(tmp_path: Path) -> None:
    run = old_run(tmp_path / "run")
    assert read_evidence(run).problems == ()
    attempt(run, 2, 5, 8)
    assert read_evidence(run).problems == ()
    part = tmp_path / "run" / "history" / "0002-00000001.jsonl"
    lines = part.read_text(encoding="utf-8").rpartition('{"kind": "sealed"')[0]
    part.write_text(lines, encoding="utf-8")
    assert read_evidence(run).problems == (f"{part}: altered: it has no seal",)


@pytest.mark.parametrize("before", [None, {"part": "x.jsonl", "lines": 1, "sha256": "0"}])
def test_a_part_of_a_version_that_linked_parts_is_read(run: Storage, before: object) -> None:
    part = Path(run.path("history", "0001-00000001.jsonl"))
    *lines, seal = part.read_text(encoding="utf-8").splitlines()
    linked = json.dumps({"kind": "sealed", "before": before, **json.loads(seal)})
    part.write_text("\n".join([*lines, linked, ""]), encoding="utf-8")
    assert read_evidence(run).problems == ()


def test_lines_that_come_late_from_a_writer_that_was_taken_for_dead(tmp_path: Path) -> None:
    run = Storage(str(tmp_path / "run"))
    late = HistoryWriter(run.sub("history"), 1, pytest.fail)
    late.add("started", {"step": 0, "world_size": 1})
    late.flush()
    late.add("step", record(1).to_dict())
    name, lines = late.unwritten()
    history.restore_part(run.sub("history"), name, lines)
    attempt(run, 2, 1, 4)
    late.add("step", record(2).to_dict())
    late.flush()
    late.add("step", record(3).to_dict())
    late.flush()
    found = read_evidence(run)
    assert found.problems == ()
    steps = history.effective_steps(found.history.entries)
    assert [step["attempt"] for step in steps] == [1, 2, 2, 2]


def test_the_command_refuses_before_anything_is_started(
    run: Storage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data_set(tmp_path / "data", samples=60)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump(tiny_recipe(tmp_path / "data", tmp_path, steps=20)), encoding="utf-8"
    )
    chosen = load_recipe(str(recipe), ["name=run"])
    data_sets = find_training_data(chosen).data_sets
    write_identity(run, RunIdentity(name="run", data=data_sets), chosen)
    stray = Path(run.path("history", "100000-00000000.jsonl"))
    shutil.copy(run.path("history", "0001-00000000.jsonl"), stray)
    before = sorted(path for path in Path(run.url).rglob("*"))
    assert run_command(["train", str(recipe), "--name", "run"]) == 2
    assert f"{stray}: not of this history: a copy of " in capsys.readouterr().err
    assert run_command(["train", str(recipe), "--name", "run", "--from", "9"]) == 2
    assert "--from: 9: no such checkpoint" in capsys.readouterr().err
    assert sorted(path for path in Path(run.url).rglob("*")) == before, "nothing is written"
    assert status(run).steps == 8
    assert run_command(["status", run.url]) == 0
    assert f"{stray}: not of this history" in capsys.readouterr().out.replace("\n", "")
    (Path(run.url) / "run.json").unlink()
    assert run_command(["train", str(recipe), "--name", "run"]) == 2
    assert "run.json: missing, but the folder has checkpoints" in capsys.readouterr().err
