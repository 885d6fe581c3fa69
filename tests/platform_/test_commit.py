"""Commits on storage: found, verified, passed over when damaged, pruned."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastrata.checkpoints.commit import (
    EVALUATION_LOSS,
    MARKER,
    Commit,
    FileRecord,
    FolderName,
    file_problems,
    find_newest_verified,
    list_commits,
    list_folders,
)
from elastrata.checkpoints.retention import prune
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "checkpoints"))


def folder_of(step: int, attempt: int = 1) -> str:
    return str(FolderName(attempt, step, "0a1b2c"))


def put(storage: Storage, step: int, attempt: int = 1, loss: float | None = None) -> Commit:
    """A commit of two small files."""
    folder = folder_of(step, attempt)
    contents = {"__0_0.distcp": b"shard %d" % step, ".metadata": b"metadata"}
    files = {}
    for name, content in contents.items():
        storage.write(content, folder, name)
        files[name] = FileRecord(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    extra = {} if loss is None else {EVALUATION_LOSS: loss}
    commit = Commit(folder=folder, step=step, samples=0, tokens=0, extra=extra, files=files)
    storage.write(commit.to_json(), folder, MARKER)
    return commit


def steps(storage: Storage) -> list[int]:
    return [commit.step for commit in list_commits(storage)]


def test_a_marker_reads_back() -> None:
    record = FileRecord(size=3, sha256="ab")
    extra = {"manifest": "1f", "world_size": 4, EVALUATION_LOSS: 2.5}
    commit = Commit(
        folder="f", step=1, samples=2, tokens=3, extra=extra, files={".metadata": record}
    )
    assert Commit.from_json(commit.to_json(), "f") == commit
    assert commit.evaluation_loss == 2.5


def test_the_newest_is_that_of_the_newest_attempt(storage: Storage) -> None:
    for step, attempt in ((100, 1), (300, 1), (200, 2)):
        put(storage, step, attempt)
    assert steps(storage) == [200, 300, 100]
    newest = find_newest_verified(storage, pytest.fail)
    assert newest is not None
    assert newest.step == 200


def truncate(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-1])
    return "__0_0.distcp is truncated (6 of 7 bytes)"


def lengthen(path: Path) -> str:
    path.write_bytes(path.read_bytes() + b"!")
    return "__0_0.distcp is altered (8 bytes, expected 7)"


def alter(path: Path) -> str:
    path.write_bytes(b"Shard 2")
    found, expected = (hashlib.sha256(text).hexdigest()[:12] for text in (b"Shard 2", b"shard 2"))
    return f"__0_0.distcp is altered (SHA-256 {found}..., expected {expected}...)"


def lose(path: Path) -> str:
    path.unlink()
    return "__0_0.distcp is missing"


def lose_all(path: Path) -> str:
    path.unlink()
    (path.parent / ".metadata").unlink()
    return "__0_0.distcp is missing (and 1 more)"


def tear_marker(path: Path) -> str:
    marker = path.parent / MARKER
    marker.write_bytes(marker.read_bytes()[:-9])
    return "commit.json is not JSON (truncated or altered)"


def alter_marker(path: Path) -> str:
    marker = path.parent / MARKER
    marker.write_text(
        marker.read_text(encoding="utf-8").replace('"samples": 0', '"samples": 8'), encoding="utf-8"
    )
    return "commit.json does not match its own digest (altered)"


def age_marker(path: Path) -> str:
    marker = path.parent / MARKER
    marker.write_text(
        marker.read_text(encoding="utf-8").replace('"format_version": 1', '"format_version": 0'),
        encoding="utf-8",
    )
    return "commit.json has format version 0, expected 1"


def lengthen_version(path: Path) -> str:
    marker = path.parent / MARKER
    longer = f'"format_version": "{"x" * 10_000}"'
    marker.write_text(
        marker.read_text(encoding="utf-8").replace('"format_version": 1', longer), encoding="utf-8"
    )
    return f"commit.json has format version 'x{'x' * 18}, expected 1"


DAMAGES = [
    *(truncate, lengthen, alter, lose, lose_all),
    *(tear_marker, alter_marker, age_marker, lengthen_version),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_commit_is_passed_over(storage: Storage, damage: Callable[[Path], str]) -> None:
    put(storage, 1)
    put(storage, 2)
    path = Path(storage.path(folder_of(2), "__0_0.distcp"))
    problem = damage(path)
    heard: list[str] = []
    found = find_newest_verified(storage, heard.append)
    assert found is not None
    assert found.step == 1
    assert heard == [
        f"checkpoint {path.parent}: {problem}; falling back to the checkpoint of step 1"
    ]


def test_no_whole_commit_is_the_users_to_know(storage: Storage) -> None:
    for step in (1, 2):
        put(storage, step)
        Path(storage.path(folder_of(step), ".metadata")).write_bytes(b"")
    with pytest.raises(UserError) as raised:
        find_newest_verified(storage, pytest.fail)
    assert list(raised.value.problems) == [
        f"checkpoint {storage.path(folder_of(step))}: .metadata is truncated (0 of 8 bytes)"
        for step in (2, 1)
    ]


def test_pruning_keeps_the_last_and_the_best(storage: Storage) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5)):
        put(storage, step, loss=loss)
    assert [commit.step for commit in prune(storage, keep_last=2, keep_best=True)] == [3, 1]
    assert steps(storage) == [5, 4, 2]
    assert prune(storage, keep_last=2, keep_best=True) == []
    prune(storage, keep_last=1, keep_best=False)
    assert steps(storage) == [5]
    assert file_problems(storage, list_commits(storage)[0]) == []


def test_pruning_keeps_every_nth_step_and_of_a_repeated_one_the_newest(storage: Storage) -> None:
    for attempt, step in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 4), (2, 5), (2, 7), (2, 8), (2, 9)):
        put(storage, step, attempt=attempt)
    removed = prune(storage, keep_last=1, keep_best=False, keep_every=2)
    assert [(commit.step, commit.place[0]) for commit in removed] == [
        *((5, 2), (4, 1), (3, 1), (1, 1))
    ]
    assert steps(storage) == [9, 8, 7, 4, 2], "7: the save of step 6 came late"


def test_one_stem_with_several_lengths_keeps_the_named_steps(storage: Storage) -> None:
    """Pruned after every save, as a run does it, far beyond `keep_last`."""
    for step in range(5, 300, 5):
        put(storage, step)
        prune(storage, keep_last=20, keep_best=False, keep_every=100, keep_steps=(15, 60, 400))
    assert steps(storage) == [*range(295, 195, -5), 100, 60, 15]
    put(storage, 405)  # the save of step 400 came late
    put(storage, 410)
    prune(storage, keep_last=1, keep_best=False, keep_steps=(400,))
    assert steps(storage) == [410, 405]


def test_pruning_removes_what_dead_attempts_left_and_nothing_that_may_be_in_work(
    storage: Storage,
) -> None:
    put(storage, 4, attempt=2)
    dead = [folder_of(9, attempt=1), folder_of(3, attempt=2)]
    in_work = [folder_of(5, attempt=2), folder_of(1, attempt=3)]
    for folder in dead + in_work:
        storage.write(b"half", folder, "__0_0.distcp")
    storage.write(b"not ours", "notes.txt")
    assert prune(storage, keep_last=2, keep_best=True) == []
    assert {str(folder) for folder in list_folders(storage)} == {folder_of(4, 2), *in_work}
    assert storage.exists("notes.txt")


def test_a_driver_looks_for_commits_without_torch() -> None:
    modules = "elastrata.checkpoints.commit, elastrata.checkpoints.retention"
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
