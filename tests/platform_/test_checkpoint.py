"""Durable checkpoints in real groups of processes: save, load at other sizes, faults, S3."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastrata.checkpoints.commit import file_problems, find_newest_verified, list_commits
from elastrata.checkpoints.state import ModelTensors
from elastrata_pipelines.storage import Storage
from support.checkpoint_ranks import run_scenario
from support.forks import fork

SECONDS = 540


@dataclass(frozen=True)
class Ended:
    """What a group of processes left behind."""

    codes: list[int | None]
    notes: list[dict[str, Any]]
    tensors: dict[str, dict[str, Tensor]]


Group = Callable[..., Ended]


@pytest.fixture
def group(tmp_path: Path) -> Group:
    """Runs a scenario of `support.checkpoint_ranks` in a number of processes."""
    count = 0

    def run(scenario: str, world_size: int, storage: str, expected: int = 0) -> Ended:
        nonlocal count
        count += 1
        folder = tmp_path / f"group{count}"
        folder.mkdir()
        paths = {name: str(folder / name) for name in ("notes", "result", "rendezvous")}
        given = [
            {**paths, "storage": storage, "rank": rank, "world_size": world_size}
            for rank in range(world_size)
        ]
        ranks = [fork(run_scenario, scenario, arguments) for arguments in given]
        for rank in ranks:
            rank.join(SECONDS)
        codes = [rank.exitcode for rank in ranks]
        assert None not in codes
        assert [code for code in codes if code] == ([expected] if expected else [])
        notes, result = folder / "notes", folder / "result"
        return Ended(
            codes,
            [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
            if notes.exists()
            else [],
            torch.load(result, weights_only=True) if result.exists() else {},
        )

    return run


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_saved_at_two_ranks_loads_at_other_numbers(group: Group, tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "checkpoints"))
    saved = group("save", 2, storage.url)

    assert [commit.step for commit in list_commits(storage)] == [3, 2, 1]
    assert [note["commit"] for note in saved.notes if "commit" in note] == [0, 1, 2, 3]
    assert [note["removed"] for note in saved.notes if "removed" in note] == [0]
    assert all(not file_problems(storage, commit) for commit in list_commits(storage))

    for world_size in (2, 3):
        loaded = group("load", world_size, storage.url)
        assert_equal(loaded.tensors["saved"], saved.tensors["saved"])
        if world_size == 2:
            assert_equal(loaded.tensors["after"], saved.tensors["after"])
        for name, value in loaded.tensors["after"].items():
            torch.testing.assert_close(value, saved.tensors["after"][name], msg=name)

    whole = dict(ModelTensors(storage, list_commits(storage)[0]))
    expected = {
        name.removeprefix("model."): value
        for name, value in saved.tensors["saved"].items()
        if name.startswith("model.")
    }
    assert_equal(whole, expected)
    assert torch.equal(whole["embedding.weight"], whole["head.weight"])


def test_training_goes_on_during_a_save_and_leaves_it_alone(group: Group, tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "checkpoints"))
    ended = group("overlap", 2, storage.url)

    loaded = group("load", 2, storage.url)
    assert_equal(loaded.tensors["saved"], ended.tensors["saved"])
    for name, value in ended.tensors["after"].items():
        assert torch.equal(value, ended.tensors["saved"][name]) == (".unused." in name), name


def test_a_rank_killed_while_it_saves_leaves_the_previous_commit(
    group: Group, tmp_path: Path
) -> None:
    storage = Storage(str(tmp_path / "checkpoints"))
    ended = group("kill", 2, storage.url, expected=-signal.SIGKILL)

    warnings = [note["warning"] for note in ended.notes if "warning" in note]
    assert len(warnings) == 1
    assert warnings[0].startswith("checkpoint of step 2 failed, training continues: RuntimeError: ")
    assert [name[:14] for name in storage.names()] == ["000000001-0001", "000000002-0002"]
    newest = find_newest_verified(storage, pytest.fail)
    assert newest is not None
    assert newest.step == 1


def test_a_failed_write_is_told_cleaned_up_and_survived(group: Group, tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "checkpoints"))
    ended = group("full_disk", 2, storage.url)

    first, failed, third = ended.notes
    assert (first, third) == ({"commit": 1}, {"commit": 3})
    assert failed["warning"].startswith(
        "checkpoint of step 2 failed, training continues: rank 1: OSError: "
        "[Errno 27] File too large: the disk mounted at "
    )
    assert [name[:9] for name in storage.names()] == ["000000001", "000000003"]
