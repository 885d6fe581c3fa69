"""Tracking, against a real SQLite store and a real MLflow server."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from mlflow import MlflowClient

from elastrata.tracking import tracker as tracker_module
from elastrata.tracking.store import sqlite_path, tracking_uri
from elastrata.tracking.tracker import DataInput, Tracker, TrackingConfig, open_tracker
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from support.command import wait_until
from support.empty_store import put_empty_store


@pytest.fixture(autouse=True)
def patient_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is written to its end, however slow the machine is."""
    monkeypatch.setattr(tracker_module, "_SECONDS_TO_FINISH", 500.0)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A storage folder whose database is there already."""
    return put_empty_store(tmp_path / "runs").parent


def _open(
    storage: Path,
    run_id: str | None = None,
    uri: str | None = None,
    *,
    name: str = "first",
    inputs: Sequence[DataInput] = (),
    **params: object,
) -> Tracker:
    return open_tracker(
        TrackingConfig(uri=uri),
        Storage(str(storage)),
        run_name=name,
        inputs=inputs,
        run_id=run_id,
        params=params or {"optimizer.lr": 1e-3},
        tags={"git.commit": "abc"},
    )


def _client(storage: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{storage / 'mlflow.db'}")


def _records(first: int, last: int, factor: float = 1.0) -> list[dict[str, float]]:
    return [{"step": step, "train/loss": factor / step} for step in range(first, last + 1)]


def _history(client: MlflowClient, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]


def test_a_run_is_recorded_beside_its_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    tracker = _open(tmp_path / "runs")
    tracker.log_steps(_records(1, 3))
    tracker.log_steps([{"step": 3, "eval/loss": 0.5}])
    tracker.tag({"world_sizes": "2"})
    tracker.log_artifact("curve.png", b"picture", "plots")
    tracker.finish("FINISHED")
    client = _client(tmp_path / "runs")
    run = client.get_run(tracker.run_id)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == {"optimizer.lr": "0.001"}
    assert run.data.tags["git.commit"] == "abc"
    assert run.data.tags["world_sizes"] == "2"
    assert _history(client, tracker.run_id, "train/loss") == [(1, 1), (2, 1 / 2), (3, 1 / 3)]
    assert _history(client, tracker.run_id, "eval/loss") == [(3, 0.5)]
    assert [item.path for item in client.list_artifacts(tracker.run_id, "plots")] == [
        "plots/curve.png"
    ]
    assert run.info.artifact_uri.startswith((tmp_path / "runs" / "mlflow-artifacts").as_uri())
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_resumed_run_is_the_same_run_and_logs_no_step_twice(runs: Path) -> None:
    first = _open(runs, **{"workers.max": 2, "steps": 9})
    first.log_steps(_records(1, 5))
    first.finish("FAILED")
    second = _open(runs, first.run_id, **{"workers.max": 3, "steps": 9, "new.key": 1})
    assert second.run_id == first.run_id
    assert _client(runs).get_run(first.run_id).info.status == "RUNNING"
    second.log_steps(_records(4, 7, factor=10))
    second.log_steps(_records(7, 8, factor=100))
    second.finish("KILLED")
    run = _client(runs).get_run(first.run_id)
    assert run.info.status == "KILLED"
    assert run.data.params == {"workers.max": "2", "steps": "9", "new.key": "1"}
    assert run.data.tags["resumed.workers.max"] == "3"
    assert _history(_client(runs), first.run_id, "train/loss") == [
        *[(step, pytest.approx(1 / step)) for step in range(1, 6)],
        (6, pytest.approx(10 / 6)),
        (7, pytest.approx(10 / 7)),
        (8, pytest.approx(100 / 8)),
    ]


def test_a_run_the_store_does_not_know_is_begun_anew(runs: Path) -> None:
    tracker = _open(runs, "0" * 32)
    tracker.finish("FINISHED")
    assert tracker.run_id != "0" * 32
    tags = _client(runs).get_run(tracker.run_id).data.tags
    assert tags["continues_run"] == "0" * 32


def test_checkpoints_are_models_of_the_run_until_they_are_deleted(runs: Path) -> None:
    first = _open(runs)
    first.record_checkpoint("s3://bucket/step-10", 10, {"eval/loss": 2.0})
    first.record_checkpoint("s3://bucket/step-20", 20, {})
    first.finish("FAILED")
    second = _open(runs, first.run_id)
    second.record_checkpoint("s3://bucket/step-20", 20, {})  # again: still one record
    second.forget_checkpoint("s3://bucket/step-10")
    second.record_checkpoint("s3://bucket/step-15", 15, {})
    second.keep_checkpoints(["s3://bucket/step-20"])
    second.tag({"checkpoint.latest": "s3://bucket/step-20"})
    second.finish("FINISHED")
    models = _client(runs).search_logged_models([second.experiment_id])
    assert [(model.name, model.tags["uri"]) for model in models] == [
        ("first-step-20", "s3://bucket/step-20")
    ]
    assert models[0].source_run_id == first.run_id
    tags = _client(runs).get_run(first.run_id).data.tags
    assert tags["checkpoint.latest"] == "s3://bucket/step-20"


def test_the_best_checkpoint_is_a_version_of_a_model_once(runs: Path) -> None:
    tracker = _open(runs)
    for uri, step in (("s3://bucket/step-10", 10), ("s3://bucket/step-20", 20)):
        for _ in range(2):  # again: still one version
            tracker.record_checkpoint(uri, step, {})
            tracker.register_checkpoint(uri, "lr")
    tracker.register_checkpoint("s3://bucket/step-10", "lr")  # the best again
    tracker.finish("FINISHED")
    versions = _client(runs).search_model_versions("name = 'lr'")
    assert {version.source for version in versions} == {
        "s3://bucket/step-10",
        "s3://bucket/step-20",
    }
    assert len(versions) == 2
    best = _client(runs).get_model_version_by_alias("lr", "best")
    assert (best.source, best.run_id) == ("s3://bucket/step-10", tracker.run_id)


def test_the_data_sets_are_inputs_of_a_run_and_of_its_parts_once(runs: Path) -> None:
    common = {"fingerprint": "f" * 64, "samples": 300, "tokens": 9000}
    inputs = [
        DataInput(url="/data/mine", purpose="training", **common),
        DataInput(url="s3://bucket/mine/held_out", purpose="evaluation", **common),
    ]
    first = _open(runs, inputs=[*inputs, inputs[0]])
    part = first.child("0000", {}, {})
    first.finish("FAILED")
    _open(runs, first.run_id, inputs=inputs).finish("FINISHED")
    for run_id in (first.run_id, part.run_id):
        logged = _client(runs).get_run(run_id).inputs.dataset_inputs
        found = {one.dataset.name: one for one in logged}
        assert len(found) == len(logged) == 2
        training, held_out = found["data/mine"], found["mine/held_out"]
        assert (training.dataset.digest, training.dataset.source_type) == ("f" * 36, "local")
        assert json.loads(training.dataset.source) == {"uri": "/data/mine"}
        assert json.loads(training.dataset.profile)["fingerprint"] == "f" * 64
        assert held_out.dataset.source_type == "s3"
        tags = [(tag.key, tag.value) for one in (training, held_out) for tag in one.tags]
        assert tags == [
            ("mlflow.data.context", "training"),
            ("mlflow.data.context", "evaluation"),
        ]


def test_what_the_store_refuses_is_dropped_with_a_warning(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = _open(runs)
    tracker.log_steps([{"step": 1, "no*such*name": 1.0}])
    tracker.log_steps(_records(1, 1))
    with caplog.at_level(logging.WARNING):
        tracker.finish("FINISHED")
    assert _history(_client(runs), tracker.run_id, "train/loss") == [(1, 1.0)]
    assert "refused a record" in caplog.text


@pytest.mark.parametrize(
    ("uri", "line"),
    [
        ("mlruns", "tracking.uri: mlruns: expected sqlite:///FILE"),
        ("sqlite://", "tracking.uri: sqlite://: expected sqlite:///FILE"),
        ("sqlite:///a?b", "tracking.uri: sqlite:///a?b: expected sqlite:///FILE, with %3F"),
        ("ftp://host/x", "tracking.uri: ftp://host/x: expected"),
        ("http://127.0.0.1:9", "tracking.uri: http://127.0.0.1:9: cannot be reached"),
        ("sqlite:////proc/no/x.db", "tracking.uri: sqlite:////proc/no/x.db: cannot be reached"),
    ],
)
def test_a_store_that_cannot_be_used_is_told_in_one_line(
    tmp_path: Path, uri: str, line: str
) -> None:
    with pytest.raises(UserError) as caught:
        _open(tmp_path, uri=uri)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(line)


def test_the_database_lies_where_its_uri_says_in_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a b%20c?d=1&e#f'g\"h%3F;é"
    folder.mkdir()
    tracker = _open(folder)
    tracker.log_steps(_records(1, 2))
    tracker.log_artifact("x.txt", b"x")
    tracker.finish("FINISHED")
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    uri = tracking_uri(None, Storage(str(folder)))
    assert sqlite_path(uri) == folder / "mlflow.db"
    assert tracking_uri(uri, Storage("elsewhere")) == uri
    # As `mlflow ui --backend-store-uri` opens it.
    run = MlflowClient(uri).get_run(tracker.run_id)
    assert run.data.metrics["train/loss"] == 0.5
    assert list(folder.rglob("x.txt"))


class Server:
    """An `mlflow server` on a loopback port, which it chooses at its first start."""

    def __init__(self, folder: Path) -> None:
        self.port = 0
        self._folder = folder
        self._log = folder / "server.log"
        self.start()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = {
            **os.environ,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        command = [
            *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
            *(
                "--port",
                str(self.port),
                "--backend-store-uri",
                f"sqlite:///{self._folder}/mlflow.db",
            ),
            *("--artifacts-destination", str(self._folder / "artifacts")),
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(self._answers, 500, "the MLflow server answers")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        text = self._log.read_text(encoding="utf-8", errors="replace")
        assert self._process.poll() is None, text
        if not (found := re.search(r"running on http://127\.0\.0\.1:(\d+)", text)):
            return False
        self.port = int(found[1])
        with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=60) as answer:
            return bool(answer.status == 200)
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    put_empty_store(folder)
    with pytest.MonkeyPatch.context() as patch:
        # A request that is given up on and sent again would be recorded twice.
        patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "500")
        patch.setenv("no_proxy", "127.0.0.1")
        server = Server(folder)
        yield server
        server.kill()


@pytest.mark.matrix
def test_a_server_that_dies_loses_nothing(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = _open(tmp_path / "runs", uri=server.uri)
    tracker.log_steps(_records(1, 2))
    server.kill()
    with caplog.at_level(logging.WARNING):
        for step in range(3, 9):
            tracker.log_steps(_records(step, step))
        tracker.log_artifact("curve.png", b"picture", "plots")
        wait_until(lambda: "does not answer" in caplog.text, 60, "the warning")
        server.start()
        tracker.finish("FINISHED")
    assert caplog.text.count("does not answer; trying again") == 1
    client = MlflowClient(server.uri)
    steps = [step for step, _ in _history(client, tracker.run_id, "train/loss")]
    assert steps == list(range(1, 9))
    assert client.get_run(tracker.run_id).info.status == "FINISHED"
    assert [item.path for item in client.list_artifacts(tracker.run_id, "plots")] == [
        "plots/curve.png"
    ]
