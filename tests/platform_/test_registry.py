"""Exports in MLflow's registry: MLflow itself loads them, from a database and from a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
import transformers
from mlflow import MlflowClient

from elastrata.cli.main import run as run_here
from elastrata.tracking.models import LoadableModel, Models, write_mlmodel
from elastrata.tracking.store import create_client
from elastrata_pipelines.preparation.config import TokenizerConfig
from elastrata_pipelines.preparation.training import train_tokenizer
from elastrata_workloads.bert import Bert
from elastrata_workloads.gpt import Gpt
from support.documented import documented_keys
from support.empty_store import put_empty_store
from support.lone_run import STEPS, lone_run

TEXT = ["Some say the world will end in fire, some say in ice. " * 9]
SIZE: dict[str, Any] = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "max_positions": 48}
pytestmark = pytest.mark.filterwarnings("ignore")  # of MLflow and transformers, when they load


@pytest.fixture(autouse=True)
def keep_tracking_uri(tmp_path: Path) -> Iterator[None]:
    """What MLflow takes where nobody says anything is a store that does not list ours."""
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/nobodys.db")
    yield
    mlflow.set_tracking_uri(None)


def _export(folder: Path, workload: Bert | Gpt) -> LoadableModel:
    kind = "bpe" if workload.name == "gpt" else "wordpiece"
    files = train_tokenizer(TEXT, TokenizerConfig(train=kind, vocab_size=300), seq_len=48)
    (folder / "tokenizer").mkdir(parents=True)
    for name, content in files.contents.items():
        (folder / "tokenizer" / name).write_text(content, encoding="utf-8")
    torch.manual_seed(0)
    model = workload.build_model(files.vocabulary(), 48)
    path = folder / "model"
    workload.export(model.state_dict(), files.vocabulary(), 48, folder / "tokenizer", path)
    task = workload.exported_as.task
    write_mlmodel(folder / "mlmodel", path, task=task)
    return LoadableModel(
        path=path,
        mlmodel=folder / "mlmodel",
        task=task,
        checkpoint="s3://b/c",
        step=7,
        metrics={"a": 0.5},
    )


@pytest.fixture
def uri(tmp_path: Path) -> str:
    uri = f"sqlite:///{put_empty_store(tmp_path)}"
    client = create_client(uri)
    client.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    return uri


def _registered(uri: str, model: LoadableModel) -> None:
    """Twice: it is one version all the same."""
    client = create_client(uri)
    experiment = client.get_experiment_by_name("e").experiment_id
    run = client.create_run(experiment).info.run_id
    models = Models(client, uri=uri, experiment_id=experiment)
    for _ in range(2):
        model_id = models.log_export(run, "first.one", model)
        assert models.register(run, model_id, model.checkpoint, "words", "best") == "1"
    models.keep(run, [])  # an export does not go with its checkpoint
    (output,) = client.get_run(run).outputs.model_outputs
    assert (output.model_id, output.step) == (model_id, 7)
    logged = client.get_logged_model(model_id)
    assert (logged.name, logged.params) == (f"first-one-{model.task}", {"step": "7", "a": "0.5"})
    mlflow.set_tracking_uri(uri)


@pytest.mark.parametrize("next_sentence", [False, True])
def test_mlflow_loads_a_bert(uri: str, tmp_path: Path, next_sentence: bool) -> None:
    model = _export(tmp_path, Bert(**SIZE, next_sentence=next_sentence))
    _registered(uri, model)
    fill = mlflow.transformers.load_model("models:/words@best")
    direct = transformers.pipeline("fill-mask", model=str(model.path))
    text = "Some say the world will [MASK] in fire."
    assert fill(text) == direct(text)
    words = mlflow.pyfunc.load_model("models:/words@best").predict([text])
    assert words == [direct(text)[0]["token_str"]]


def test_the_command_registers_the_model_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = lone_run(tmp_path)
    for number, checkpoint in enumerate(["newest", "best", "2"]):
        out = ["--out", str(tmp_path / str(number)), "--checkpoint", checkpoint]
        assert run_here(["export", str(run), *out, "--register", "words", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert list(result) == documented_keys("export")
        wanted = "models:/words/3" if checkpoint == "2" else f"models:/words@{checkpoint}"
        assert result["registered"] == wanted
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    best = client.get_model_version_by_alias("words", "newest")
    logged = client.get_logged_model(best.tags["model_id"])
    assert logged.params["step"] == str(STEPS)
    names = {item.path for item in client.list_logged_model_artifacts(logged.model_id)}
    assert {"MLmodel", "model"} <= names
    assert not (tmp_path / "nobodys.db").exists()
