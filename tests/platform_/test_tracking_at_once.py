"""Runs that begin in the same moment, with the same data, in the same store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from mlflow import MlflowClient

from elastrata.tracking.tracker import DataInput, log_inputs
from support.empty_store import put_empty_store

RUNS, ROUNDS = 4, 10


def test_all_of_them_record_what_they_read(tmp_path: Path) -> None:
    client = MlflowClient(f"sqlite:///{put_empty_store(tmp_path / 'runs')}")
    experiment = client.create_experiment("at-once")
    runs = [client.create_run(experiment).info.run_id for _ in range(RUNS)]
    start = Barrier(RUNS, timeout=500)

    def record(run: str) -> None:
        for number in range(ROUNDS):
            start.wait()
            data = DataInput(
                url=f"/data/{number}", fingerprint="f", samples=1, tokens=1, purpose="training"
            )
            log_inputs(client, run, [data])

    with ThreadPoolExecutor(RUNS) as threads:
        list(threads.map(record, runs))
    for run in runs:
        assert len(client.get_run(run).inputs.dataset_inputs) == ROUNDS
