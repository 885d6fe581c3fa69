"""Which state a run continues from: the newest whole one that it has not gone back behind."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from elastrata.checkpoints.commit import MARKER, METADATA, Commit, FileRecord, FolderName
from elastrata.run import history
from elastrata.trainer.resume import find_resume_point
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "run"))


@pytest.fixture
def hot(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "hot"))


def commit(storage: Storage, attempt: int, step: int) -> str:
    folder = str(FolderName(attempt, step, "abcdef"))
    data = b"a state"
    record = FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    made = Commit(
        folder=folder, step=step, samples=step, tokens=step, extra={}, files={METADATA: record}
    )
    storage.write(data, folder, METADATA)
    storage.write(made.to_json(), folder, MARKER)
    return folder


def started(run: Storage, attempt: int, step: int) -> None:
    writer = history.HistoryWriter(run.sub("history"), attempt, pytest.fail)
    writer.add("started", {"step": step, "world_size": 1})
    writer.flush()


def found(run: Storage, hot: Storage) -> tuple[str, int]:
    newest = find_resume_point(run, hot, pytest.fail)
    return newest.tier, newest.start.step


def test_the_newest_of_both_tiers(run, hot) -> None:
    started(run, 1, 0)
    commit(run.sub("checkpoints"), 1, 200)
    assert found(run, hot) == ("durable", 200)
    commit(hot, 1, 190)
    assert found(run, hot) == ("durable", 200)
    commit(hot, 1, 210)
    assert found(run, hot) == ("hot", 210)


def test_a_state_that_the_run_went_back_behind_counts_no_more(run, hot) -> None:
    started(run, 1, 0)
    commit(run.sub("checkpoints"), 1, 200)
    commit(run.sub("checkpoints"), 1, 300)
    commit(hot, 1, 350)
    assert found(run, hot) == ("hot", 350)
    started(run, 2, 200)  # it found nothing newer, did some steps, and was lost
    assert found(run, hot) == ("durable", 200)
    commit(hot, 2, 220)
    assert found(run, hot) == ("hot", 220)
    started(run, 3, 220)
    assert found(run, hot) == ("hot", 220)


def test_a_copy_in_memory_goes_on_where_the_checkpoints_are_no_folder(
    run: Storage, hot: Storage
) -> None:
    started(run, 1, 0)
    run.write(b"", "checkpoints")
    with pytest.raises(UserError, match="a file, expected a folder"):
        found(run, hot)
    commit(hot, 1, 180)
    warnings: list[str] = []
    newest = find_resume_point(run, hot, warnings.append)
    assert (newest.tier, newest.start.step) == ("hot", 180)
    assert warnings == [f"{run.uri('checkpoints')}: a file, expected a folder"]
