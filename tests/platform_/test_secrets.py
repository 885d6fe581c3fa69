"""Secrets: those in the environment are written nowhere, and those in a recipe are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from elastrata.recipe.file import load_recipe
from elastrata_pipelines.configured_text import without_secrets
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.preparation import PrepareConfig
from elastrata_pipelines.storage import Storage
from support.command import run
from support.synthetic import tiny_recipe, write_data_set

SECRET = "hunter2-correct-horse"
PLACES = (
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GOOGLE_API_KEY", "AZURE_STORAGE_KEY"),
    *("MLFLOW_TRACKING_PASSWORD", "PGPASSWORD", "RAY_AUTH_TOKEN", "HF_TOKEN"),
)


def _written(storage: Storage) -> Iterator[tuple[str, bytes]]:
    """Every file below a folder or URL, with what is in it."""
    for path in storage.fs.find(storage.path()):
        yield path, storage.fs.cat_file(path)


@pytest.mark.matrix  # a run
def test_no_secret_of_the_environment_is_written(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a dump of the recipe, the record, the history, a checkpoint or what is shown."""
    write_data_set(tmp_path / "data", samples=100)
    tracking = {"uri": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    recipe = tiny_recipe(tmp_path / "data", f"{bucket}/runs", tracking=tracking)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    for number, name in enumerate(PLACES):
        monkeypatch.setenv(name, f"{SECRET}-{number}")
    done = run("train", tmp_path / "recipe.yaml", "--name", "run", "--json")
    assert done.returncode == 0, done.stderr
    files = dict(_written(Storage(f"{bucket}/runs"))) | dict(_written(Storage(str(tmp_path))))
    names = {path.rsplit("/", 1)[-1] for path in files}
    assert {"recipe.yaml", "mlflow.db", "driver.json"} <= names
    assert any("/checkpoints/" in path for path in files)
    leaks = [path for path, content in files.items() if SECRET.encode() in content]
    assert leaks == []
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("tracking.uri", f"postgresql://me:{SECRET}@db/mlflow", "'postgresql://***@db/mlflow'"),
        ("tracking.uri", f"https://me:{SECRET}@mlflow", "'https://***@mlflow'"),
        ("tracking.uri", f"mysql://db/x?password={SECRET}", "'mysql://db/x?password=***'"),
        ("storage", f"s3://key:{SECRET}@bucket/runs", "'s3://***@bucket/runs'"),
        ("data.path", f"abfs://c@a/x?sv=1&sig={SECRET}", "'abfs://c@a/x?sv=1&sig=***'"),
    ],
)
def test_a_secret_in_a_recipe_is_refused_and_not_shown(key: str, value: str, shown: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("bert/tiny", [f"{key}={value}"])
    (line,) = caught.value.problems
    assert line.startswith(f"command line: {key}: {shown}: expected no secret in a URL")


def test_a_secret_in_a_source_of_text_is_refused() -> None:
    source = {"paths": ["text.txt", f"https://x/y.txt?X-Amz-Signature={SECRET}"]}
    with pytest.raises(ValueError, match="expected no secret in a URL"):
        PrepareConfig.model_validate(
            {"sources": [source], "tokenizer": {"train": "bpe"}, "seq_len": 32}
        )


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg2://mlflow@db.example.com:5432/mlflow",
        "http://mlflow:5000",
        "s3://bucket/a:b@c/d",
        "abfs://container@account.dfs.core.windows.net/runs",
        "sqlite:////home/me/x:y@z.db",
        "https://host/file.txt?version=3&signed=no",
    ],
)
def test_what_is_no_secret(url: str) -> None:
    assert without_secrets(url) == url
