"""Workers that stay: the GPU of a process, aborted collectives, and a Ray that lacks a member."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig
from ray.train.v2._internal.callbacks import accelerators

from elastrata.cluster import prestarted, staying_workers
from elastrata.cluster.hang_trace import HangTrace
from elastrata.cluster.ray_train_internals import PRIVATE_MEMBERS, WorkerGroup, missing_members
from elastrata.cluster.staying_workers import (
    STAYING_VARIABLES,
    join_group,
    leave_group,
)
from elastrata.cluster.worker import WorkerSender
from elastrata.cluster.worker_group import worker_modules, worker_variables
from elastrata.device.device_transfer import AbortedError
from elastrata.step.events import Evaluated, Warned
from elastrata_workloads.bert import Bert
from elastrata_workloads.gpt import Gpt
from support.histories import record


@dataclass
class Process:
    """A worker's process. CUDA reads its visible devices once, when it is first used."""

    gpu: int
    environ: dict[str, str]
    seen: list[int] | None = None

    @property
    def metadata(self) -> Any:
        return SimpleNamespace(node_id="node", accelerator_ids={"GPU": [self.gpu]})

    def execute_async(self, function: Any, **arguments: str) -> None:
        (self.environ["CUDA_VISIBLE_DEVICES"],) = arguments.values()

    def computes_on(self) -> int:
        """The GPU that the index which Ray Train takes means in this process."""
        visible = [int(each) for each in self.environ["CUDA_VISIBLE_DEVICES"].split(",")]
        self.seen = self.seen or visible
        return self.seen[visible.index(self.gpu)]


def started(gpu: int) -> Process:
    """A process as Ray starts it: it sees its own GPU alone."""
    return Process(gpu, {"CUDA_VISIBLE_DEVICES": str(gpu)})


def form_group(processes: list[Process]) -> list[int]:
    """Begin a group with Ray Train's own callback; return the GPU that each process computes on."""
    scaling = ScalingConfig(num_workers=len(processes), use_gpu=True)
    callback = accelerators.AcceleratorSetupCallback(TorchConfig(), scaling)
    callback.before_init_train_context(processes)  # type: ignore[arg-type]
    return [process.computes_on() for process in processes]


@pytest.mark.parametrize(
    ("first", "second", "if_shared"),
    [([0, 1, 2, 3], [1, 2, 3], [0, 1, 2]), ([2, 3], [2, 3, 0, 1], None)],
)
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_process_that_stays_keeps_its_gpu(
    first: list[int],
    second: list[int],
    if_shared: list[int] | None,
    is_shared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray Train would share the ids of a node: other GPUs without an error, or one that is not."""
    monkeypatch.setattr(accelerators.ray, "get", list)
    for name, value in STAYING_VARIABLES.items() if not is_shared else ():
        monkeypatch.setenv(name, value)
    processes = {gpu: started(gpu) for gpu in first}
    assert form_group(list(processes.values())) == first
    group = [processes.get(gpu) or started(gpu) for gpu in second]
    if not is_shared:
        assert form_group(group) == second
    elif if_shared:
        assert form_group(group[: len(if_shared)]) == if_shared
    else:
        with pytest.raises(IndexError):
            form_group(group)


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The state of a worker whose collectives were aborted."""
    module = staying_workers.__name__
    for name in ("torch.cuda.is_available", "torch.distributed.is_initialized"):
        monkeypatch.setattr(name, lambda: True)
    for name in ("_abort_process_group", "dist.destroy_process_group", "torch.cuda.empty_cache"):
        monkeypatch.setattr(f"{module}.{name}", lambda: None)
    monkeypatch.setattr(f"{module}.training_has_ended", lambda seconds: True)
    assert leave_group(1.0)
    yield
    join_group()


def test_no_result_of_an_aborted_collective_leaves_the_worker(
    aborted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("elastrata.cluster.channel.Sender.send", lambda _, e: sent.append(e))
    trace = HangTrace(f"{tmp_path}/rank-", 0, 600.0)
    sender = WorkerSender(None, rank=0, trace=trace)
    line = Warned(text="the state is still being saved")
    results = [record(1), Evaluated(step=1, loss=0.1, metrics={}, seconds=1.0)]
    for result in results:
        with pytest.raises(AbortedError):
            sender.send(result)
    sender.send(line)
    join_group()
    sender.send(results[0])
    assert sent == [line, results[0]]
    trace.close()


@pytest.mark.parametrize(("stay", "mode"), [(True, "0"), (False, "3")])
def test_the_error_mode_of_nccl_is_set_and_its_collectives_are_recorded(
    stay: bool, mode: str
) -> None:
    variables = worker_variables(stay=stay)
    assert variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == mode
    assert int(variables["TORCH_NCCL_TRACE_BUFFER_SIZE"]) > 0
    assert variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_the_members_of_ray_train_are_few_and_one_that_is_missing_is_named() -> None:
    assert missing_members() == []
    assert sum(map(len, PRIVATE_MEMBERS.values())) <= 8
    renamed = {WorkerGroup: ("_create_workers", "_make_places")}
    assert missing_members(renamed) == ["WorkerGroup._make_places"]


@pytest.mark.parametrize(("workload", "modules"), [(Bert, ["model", "parallel"]), (Gpt, ["model"])])
def test_workers_import_what_their_workload_has(workload: Any, modules: list[str]) -> None:
    package = workload.__module__.rpartition(".")[0]
    found = [name for name in worker_modules(workload()) if name.startswith(package)]
    assert found == [f"{package}.{module}" for module in modules]


def test_what_cannot_be_imported_ahead_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = ["nowhere.to_be_found", "wsgiref.headers"]
    for name, value in prestarted.runtime_env(modules)["env_vars"].items():
        monkeypatch.setenv(name, value)
    prestarted.import_ahead()
    assert "wsgiref.headers" in sys.modules
    assert "nowhere.to_be_found: ModuleNotFoundError" in capsys.readouterr().err
