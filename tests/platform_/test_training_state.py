"""The state of a run in one process: what is taken, what is put back, what is refused."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastrata.checkpoints.commit import Commit, list_commits
from elastrata.checkpoints.dcp_reader import _MetadataUnpickler
from elastrata.checkpoints.save import DurableSaver
from elastrata.checkpoints.state import (
    ModelTensors,
    load,
    restore,
    training_state,
)
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "checkpoints"))


def saved(storage: Storage, state: dict[str, Any]) -> Commit:
    saving = DurableSaver(storage, keep_last=1, keep_best=False, warn=pytest.fail)
    assert saving.save(state, step=1, samples=2, tokens=3, extra={"recipe": "5e"}) > 0
    saving.close()
    (commit,) = list_commits(storage)
    return commit


def trained(width: int = 3, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_a_plain_model_and_its_optimizer_come_back(storage: Storage) -> None:
    model, optimizer = trained()
    commit = saved(storage, training_state(model, optimizer))
    other, other_optimizer = trained(seed=1)
    restore(storage, commit, other, other_optimizer)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        for name, value in optimizer.state[one].items():
            assert torch.equal(value, other_optimizer.state[two][name])


def test_the_state_is_copied_before_save_returns(storage: Storage) -> None:
    saving = DurableSaver(storage, keep_last=3, keep_best=False, warn=pytest.fail)
    live = torch.zeros(1000)
    for step in (1, 2):
        live.fill_(step)
        saving.save({"model": {"x": live}}, step=step, samples=0, tokens=0)
        live.fill_(-1)
    saving.close()
    found = [ModelTensors(storage, commit)["x"] for commit in list_commits(storage)]
    assert [value.unique().tolist() for value in found] == [[2.0], [1.0]]


def test_a_committed_step_is_not_saved_again(storage: Storage) -> None:
    heard: list[int] = []
    saving = DurableSaver(
        storage,
        keep_last=1,
        keep_best=False,
        warn=pytest.fail,
        on_commit=lambda commit: heard.append(commit.step),
    )
    for _ in range(2):
        saving.save({"x": torch.ones(1)}, step=7, samples=0, tokens=0)
    saving.close()
    assert heard == [7]


def test_an_error_after_the_commit_is_told_and_the_commit_stays(storage: Storage) -> None:
    def refuse(commit: Commit) -> None:
        raise ValueError("no such experiment\nand more")

    heard: list[str] = []
    saving = DurableSaver(
        storage, keep_last=1, keep_best=False, warn=heard.append, on_commit=refuse
    )
    saving.save({"x": torch.ones(1)}, step=7, samples=0, tokens=0)
    saving.close()
    assert heard == [
        "checkpoint of step 7 is saved, but cleaning up after it failed: ValueError: no such "
        "experiment"
    ]
    assert len(list_commits(storage)) == 1


def test_another_model_is_refused_in_one_line(storage: Storage) -> None:
    model, optimizer = trained()
    commit = saved(storage, training_state(model, optimizer))
    with pytest.raises(UserError, match=r"'model.weight' has shape \(2, 3\), not \(2, 4\) \(and 2"):
        restore(storage, commit, *trained(width=4))
    with pytest.raises(UserError, match=r"has no 'model.0.weight' \(and 1 more\): it was saved"):
        restore(storage, commit, nn.Sequential(nn.Linear(3, 2)))
    other = nn.Linear(3, 2)
    with pytest.raises(UserError, match=r"has no 'optimizer.state.weight.square_avg'"):
        restore(storage, commit, other, torch.optim.RMSprop(other.parameters()))


def test_plain_values_come_back_and_code_does_not(storage: Storage) -> None:
    commit = saved(storage, {"plain": {"betas": (0.9, 0.95)}, "code": {"it": os.getcwd}})
    state: dict[str, Any] = {"plain": {"betas": None}}
    load(storage, commit, state)
    assert state == {"plain": {"betas": (0.9, 0.95)}}
    with pytest.raises(RuntimeError, match="Weights only load failed"):
        load(storage, commit, {"code": {"it": None}})


def test_metadata_cannot_name_functions(tmp_path: Path) -> None:
    path = tmp_path / "code"
    path.write_bytes(pickle.dumps(os.getcwd))
    with path.open("rb") as stream, pytest.raises(pickle.UnpicklingError, match=r"posix\.getcwd"):
        _MetadataUnpickler(stream).load()
