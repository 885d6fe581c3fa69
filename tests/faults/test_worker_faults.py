"""One rank goes wrong, in the middle of a step: the run does it again and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from elastrata.driver.launch import train
from elastrata.driver.ray_session import ray_session
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from support.faulty import MEMORY_LIMIT, RANK, FaultyBert
from support.nodes import nodes
from support.synthetic import SEQ_LEN, tiny_recipe, write_data_set

STEPS = 60
HOT_STEPS = 10
MEMORY_BYTES = 7 * 2**30
ROOM_BYTES = 5 * 2**30
"""Before a node is out of memory: enough for a run, not for what a rank takes then."""


@pytest.fixture(autouse=True)
def workers_find_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    write_data_set(tmp_path / "data", samples=400)
    return tiny_recipe(
        tmp_path / "data",
        tmp_path / "runs",
        steps=STEPS,
        optimizer={"lr": 1e-2},
        checkpoint={"every": 1000, "hot_steps": HOT_STEPS},
        workers={"min": 1, "max": 2, "cpus": 1, "threads": 1, "spares": False},
    )


def train_faulty(
    values: dict[str, Any], folder: Path, address: str | None = None, **fault: Any
) -> list[Any]:
    """The history of a run on a Ray cluster."""
    recipe = Recipe.model_validate(values)
    workload = FaultyBert(**values["workload"], **{"after": 30, **fault}, marker=folder / "marker")
    faulty = recipe.model_copy(update={"workload": workload})
    result = train(faulty, name="faulty", address=address, show=lambda _: None)
    assert result.status == "FINISHED"
    entries = history.read_entries(Storage(str(folder / "runs" / "faulty" / "history")))
    return sorted(entries, key=lambda entry: float(entry["time"]))


def assert_done_again(entries: list[Any], fault: str) -> None:
    faults = [entry["text"] for entry in entries if entry["kind"] == "fault"]
    assert fault in faults[0]
    assert [e["state"] for e in entries if e["kind"] == "started"] == ["new", "hot"]
    undone = [e["last"] - e["first"] + 1 for e in entries if e["kind"] == "rolled_back"]
    assert sum(undone) <= HOT_STEPS
    steps = history.effective_steps(entries)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))


@pytest.mark.matrix  # a run of two workers
def test_an_exception_in_one_rank(values, tmp_path) -> None:
    with ray_session("local", num_cpus=2):
        entries = train_faulty(values, tmp_path, fault="raises")
    assert_done_again(entries, f"rank {RANK}: OSError: [Errno 5] Input/output error")


@pytest.mark.matrix
def test_a_rank_that_takes_more_memory_than_there_is(values, tmp_path) -> None:
    memory = psutil.virtual_memory()
    limit = (memory.total - memory.available + ROOM_BYTES) / memory.total
    with nodes() as cluster:
        cluster.add(cpus=1)
        cluster.add(cpus=1, env_vars={MEMORY_LIMIT: f"{limit:.3f}"})
        entries = train_faulty(
            values,
            tmp_path,
            cluster.address,
            fault="takes all memory",
            memory_bytes=MEMORY_BYTES,
        )
    assert_done_again(entries, "its process was killed because the node ran out of memory")


@pytest.mark.matrix
def test_auto_takes_smaller_micro_batches_where_a_device_has_no_room(values, tmp_path) -> None:
    """And none that has run out before, in no later group."""
    auto = {"micro_batch_tokens": "auto"}
    small = {"fault": "has a small device", "positions": 2 * SEQ_LEN}
    with ray_session("local", num_cpus=2):
        entries = train_faulty({**values, **auto}, tmp_path, **small)
    ran_out = [entry for entry in entries if entry["kind"] == "ran_out"]
    assert ran_out
    assert all(f"rank {RANK}" in e["text"] for e in entries if e["kind"] == "fault")
    tried = [entry["choice"] for entry in ran_out]
    assert all(tried.count(choice) == 1 for choice in tried)
    assert len(history.effective_steps(entries)) == STEPS


@pytest.mark.matrix
def test_settings_that_do_not_fit_end_the_run_with_those_that_do(values, tmp_path) -> None:
    values["workers"]["memory_gb"] = 4
    small = {"fault": "has a small device", "positions": 1}
    with (
        ray_session("local", num_cpus=2),
        pytest.raises(UserError, match=r"out of memory: CPU.*does not fit"),
    ):
        train_faulty(values, tmp_path, **small)
