"""The record of a run on a tracking server with PostgreSQL and S3."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elastrata.tracking.store import create_client
from elastrata_pipelines.storage import Storage
from support.command import run_json
from support.synthetic import tiny_recipe, write_data_set
from support.tracking_server import postgresql, tracking_server


@pytest.mark.matrix
def test_a_run_is_on_record_on_a_server(bucket: str, tmp_path: Path) -> None:
    write_data_set(tmp_path / "data", samples=100)
    log, artifacts = tmp_path / "server.log", f"{bucket}/artifacts"
    with postgresql() as database, tracking_server(database, artifacts, log) as address:
        recipe = tiny_recipe(tmp_path / "data", tmp_path / "runs", tracking={"uri": address})
        (tmp_path / "recipe.yaml").write_text(
            yaml.safe_dump({**recipe, "steps": 4}), encoding="utf-8"
        )
        result = run_json("train", tmp_path / "recipe.yaml", "--name", "recorded")
        client = create_client(address)
        record = client.get_run(result["mlflow_run_id"])
        losses = client.get_metric_history(record.info.run_id, "train/loss")
    assert record.info.status == "FINISHED"
    assert [metric.step for metric in losses] == [1, 2, 3, 4]
    assert not (tmp_path / "runs" / "mlflow.db").exists()
    assert Storage(artifacts).names()
