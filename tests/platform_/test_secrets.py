"""Secrets: those in the environment are written nowhere, and those in a recipe are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from elastrata.cli.main import BAD_INPUT
from elastrata.cli.main import run as run_here
from elastrata.deploy.jobs import connect_to_job_server
from elastrata.recipe.file import load_recipe
from elastrata.tracking.store import tracking_uri
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.preparation import PrepareConfig
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.url_secrets import NO_SECRET, hide_secrets, hide_unrecorded_parts
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


SECRETS = {
    f"https://{SECRET}@host/x": "https://***@host/x",
    f"HTTPS://me:{SECRET}@host/x": "HTTPS://***@host/x",
    f"https://me:a/{SECRET}@host/x": "https://***",
    f"https://me:1/{SECRET}@host/x": "https://***",
    f"https://a#{SECRET}@host/x": "https://***",
    f"https://a@{SECRET}@host/x": "https://***@host/x",
    f"https://{SECRET}%40host/x": "https://***",
    f"https:\\\\{SECRET}@host": "https:\\\\***",
    f"https:/{SECRET}@host/x": "https:/***@host/x",
    f"ht\ntps://{SECRET}@host/x": "https://***@host/x",
    f"https://host/x?api_key={SECRET}": "https://host/x?api_key=***",
    f"https://host/x?key={SECRET}": "https://host/x?key=***",
    f"https://host/x?auth={SECRET}&a=b": "https://host/x?auth=***",
    f"https://host/x?access_key={SECRET}": "https://host/x?access_key=***",
    f"https://host/x?AWSAccessKeyId={SECRET}": "https://host/x?AWSAccessKeyId=***",
    f"https://host/x?pwd={SECRET}": "https://host/x?pwd=***",
    f"https://host/x?code={SECRET}": "https://host/x?code=***",
    f"https://host/x?to%6ben={SECRET}": "https://host/x?***",
    f"https://host/x?version=3&q={SECRET}": "https://host/x?version=3&***",
    f"https://host/x?version=3%26token={SECRET}": "https://host/x?***",
    f"https://host/x?{SECRET}": "https://host/x?***",
    f"https://host/x?{SECRET}=": "https://host/x?***",
    f"https://host/x;password={SECRET}": "https://host/x;password=***",
    f"https://host/x#token={SECRET}": "https://host/x#token=***",
    f"https://host/x#{SECRET}": "https://host/x#***",
    f"https://host/x%3Ftoken={SECRET}": "https://host/***",
    f"simplecache::https://host/x?token={SECRET}": "simplecache::https://host/x?token=***",
    f"zip://a.txt::s3://key:{SECRET}@bucket/x": "zip://a.txt::s3://***@bucket/x",
    f"s3://{SECRET}@bucket/x": "s3://***@bucket/x",
    f"hf://{SECRET}@datasets/me/x": "hf://***@datasets/me/x",
    f"gs://bucket/x?access_token={SECRET}": "gs://bucket/x?access_token=***",
    f"sftp://me:{SECRET}@host/x": "sftp://***@host/x",
    f"abfs://c:{SECRET}@account.dfs.core.windows.net/x": (
        "abfs://***@account.dfs.core.windows.net/x"
    ),
    f"postgresql+psycopg2://me:{SECRET}@db/x": "postgresql+psycopg2://***@db/x",
    f"mssql+pyodbc:///?odbc_connect=PWD%3D{SECRET}": "mssql+pyodbc:///?***",
    f"file:///x?token={SECRET}": "file:///x?token=***",
    f"/data/x?token={SECRET}": "/data/x?token=***",
}
"""Values, and what is shown of them."""


@pytest.mark.parametrize(("value", "shown"), SECRETS.items(), ids=range(len(SECRETS)))
def test_a_secret_in_a_url_is_hidden_and_the_url_not_opened(value: str, shown: str) -> None:
    assert hide_unrecorded_parts(value) == shown
    with pytest.raises(UserError) as caught:
        Storage(value).path()
    assert str(caught.value) == f"{shown}: {NO_SECRET}"


COMMANDS = (
    "train bert/tiny --name x {key}={url}",
    "train bert/tiny --name x --address {url}",
    "train --resume {url}",
    "train {url}",
    "prepare --text {url} --out x",
    "prepare --text text.txt --out {url}",
    "prepare --text text.txt --out x --tokenizer {url}",
    "prepare bert/tiny data.prepare.sources.0.paths={url}",
    "sweep sweep.yaml",
    "sweep sweep.yaml data.path={url}",
    "sweep --best {url}",
    "fork {url} --name x",
    "fork run --name x storage={url}",
    "export {url} --out x",
    "export run --out={url}",
    "export run --out x --push {url}",
    "export run --out x --register {url}",
    "submit bert/tiny --cluster {url}",
    "submit recipe.yaml --cluster http://127.0.0.1:9",
    "submit bert/tiny --cluster http://127.0.0.1:9 --name x {key}={url}",
    "stop {url} --cluster http://127.0.0.1:9",
    "runs --storage {url}",
    "status {url}",
    "audit {url}",
    "inspect {url}",
    "inspect recipe.yaml",
    "generate {url} --prompt p",
    "evaluate {url}",
    "plan bert/tiny {key}={url} --write x.yaml",
    "plan bert/tiny --cluster {url}",
    "simulate --trace {url}",
    "doctor --storage {url}",
    "doctor --tracking {url}",
    "guard --metadata {url}",
    "schema recipe --out {url}",
    "quickstart --out {url}",
    "{url}",
    "--traceback train {url} --unknown={url}",
)


@pytest.mark.parametrize("url", [f"https://{SECRET}@host/x", f"https://host/x?foo={SECRET}"])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("signals_as_before")
def test_no_command_shows_or_writes_a_secret(
    command: str,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("A text.", encoding="utf-8")
    given = {
        "recipe.yaml": {"extends": "bert/tiny", "name": "x", "data": {"path": url}},
        "sweep.yaml": {"recipe": "bert/tiny", "space": {"data.path": {"choice": [url]}}},
    }
    for name, values in given.items():
        (tmp_path / name).write_text(yaml.safe_dump(values), encoding="utf-8")
    arguments = [part.format(url=url, key="tracking.uri") for part in command.split()]
    assert run_here(arguments) == BAD_INPUT
    told = capfd.readouterr()
    assert "no secret in a URL" in told.err
    assert SECRET not in told.out + told.err
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in given]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_places_given_in_python_hold_no_secret() -> None:
    url = f"https://{SECRET}@host:8265"
    with pytest.raises(UserError, match="no secret in a URL") as of_tracking:
        tracking_uri(url, Storage("runs"))
    with (
        pytest.raises(UserError, match="no secret in a URL") as of_jobs,
        connect_to_job_server(url),
    ):
        pass
    source = {"paths": [f"https://host/x?foo={SECRET}"]}
    with pytest.raises(ValueError, match="no secret in a URL") as of_sources:
        PrepareConfig.model_validate(
            {"sources": [source], "tokenizer": {"train": "bpe"}, "seq_len": 32}
        )
    for caught in (of_tracking, of_jobs, of_sources):
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg2://mlflow@db.example.com:5432/mlflow",
        "postgresql://db:5432/mlflow?sslmode=require&sslkey=/etc/mlflow.key",
        "mssql+pyodbc://me@host/db?driver=ODBC+Driver+17+for+SQL+Server",
        "http://mlflow:5000",
        "http://[::1]:5000/x",
        "s3://bucket/a:b@c/d",
        "s3://bucket/part-?.jsonl",
        "s3://bucket/a b/year=2024/a#b;c&d.txt",
        "abfs://container@account.dfs.core.windows.net/runs",
        "hf://datasets/me/text@revision/x.parquet",
        "sftp://me@host/x",
        "sqlite:////home/me/x:y@z.db",
        "https://host/file.txt?version=3&signed=no",
        "https://host/@me/a%20b.txt",
        "file:///data/a?b#c;d.txt",
        "/data/a?b#c=1;d@e.txt",
        "zip://a.txt::s3://bucket/x.zip",
        "models:/NAME@best",
        'a <doc url="https://en.wikipedia.org/wiki?curid=12">',
    ],
)
def test_what_is_no_secret(url: str) -> None:
    assert hide_unrecorded_parts(url) == url
    assert " " in url or hide_secrets(f"{url}: cannot be read") == f"{url}: cannot be read"
