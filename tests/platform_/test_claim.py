"""A folder belongs to one thing: every command against every kind of folder, and copies of runs."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from elastrata import Recipe
from elastrata.api import train
from elastrata.cli.main import run as run_here
from elastrata.driver.fork import plan_fork
from elastrata.run.claim import claim, folder_kind
from elastrata.run.folder import read_identity, read_resumed_recipe
from elastrata.run.fork import begin_fork
from elastrata.run.ownership import own_run, read_owner
from elastrata.tracking.store import tracking_uri
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from support.lone_run import lone_run
from support.synthetic import tiny_recipe, write_data_set

STEPS = 2
KINDS = ("run", "sweep", "data set", "exported model", "other files", "half-exported", "a file")
FILES = {
    "sweep": ("sweep.yaml", "recipe.yaml", "journal/0001-00000000.jsonl", "trials/0000/run.json"),
    "exported model": ("config.json", "model.safetensors", "README.md"),
    "half-exported": (".export-ab12/model/model.safetensors",),
    "other files": ("notes.txt", "recipe.yaml"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data`, a finished run `runs/stem`, its recipe and a sweep's file."""
    folder = tmp_path_factory.mktemp("claim")
    lone_run(folder, "stem")
    recipe = tiny_recipe("data", "runs", evaluation={"every": 1, "samples": 32})
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    sweep = {"recipe": "tiny.yaml", "space": {"optimizer.lr": {"uniform": [0.1, 0.5]}}, "trials": 1}
    (folder / "lr.yaml").write_text(yaml.safe_dump(sweep), encoding="utf-8")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("some words to learn from\n" * 50, encoding="utf-8")
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in which commands run."""
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def put(folder: Path, kind: str) -> None:
    """Makes a folder of that kind."""
    if kind == "run":
        shutil.copytree("runs/stem", folder)
    elif kind == "data set":
        write_data_set(folder, samples=40)
    elif kind == "a file":
        folder.write_text("text", encoding="utf-8")
    for name in FILES.get(kind, ()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}", encoding="utf-8")


def tree(folder: Path) -> dict[str, str]:
    """The names below a folder, with checksums of the files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }


COMMANDS = {
    "train": ("train tiny.yaml --name x", "runs/x", "run"),
    "fork": ("fork runs/stem --name x", "runs/x", ""),
    "sweep": ("sweep lr.yaml --name x", "runs/x", "sweep"),
    "prepare": ("prepare --text text --out x", "x", "data set"),
    "export": ("export runs/stem --out x", "x", ""),
    "quickstart": ("quickstart --out x", "x", "other files half-exported"),
    "train in": ("train tiny.yaml --name y storage=x", "x", "other files half-exported"),
    "sweep in": ("sweep lr.yaml --name y recipe.storage=x", "x", "other files half-exported"),
    "resume": ("train --resume x", "x", "run"),
    "status": ("status x", "x", "run"),
    "audit": ("audit x", "x", "run"),
    "fork of": ("fork x --name y", "x", "run"),
    "export of": ("export x --out y", "x", "run"),
    "best of": ("sweep --best x", "x", "sweep"),
    "inspect": ("inspect x", "x", "data set"),
}
"""By name the command, the folder that it is to use, and the kinds that it may find there."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_a_folder_of_another_kind(
    command: str, kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, folder, allowed = COMMANDS[command]
    if kind in allowed and kind:
        return
    put(Path(folder), kind)
    before = tree(here)
    assert run_here(line.split()) == 2
    told = capsys.readouterr().err.splitlines()
    assert any(str(folder) in one for one in told), told
    assert tree(here) == before, "a refused command leaves everything as it was"


def test_another_command_that_works_there_is_told(here: Path) -> None:
    """A live `train` that has not begun its run yet, and one that has."""
    plan = plan_fork("runs/stem@2", "child")
    run = plan.fork.run
    with own_run(run, lost=pytest.fail):
        before = tree(here / "runs" / "child")
        with pytest.raises(UserError, match="driven by process"):
            begin_fork(plan.fork)
        with (
            pytest.raises(UserError, match="driven by process"),
            claim(run, "sweep", lost=pytest.fail),
        ):
            pytest.fail("two commands in one folder")
        assert tree(here / "runs" / "child").keys() == before.keys()
    begin_fork(plan.fork)
    assert folder_kind(run) == "run"
    with pytest.raises(UserError, match="another command has just created it"):
        begin_fork(plan.fork)


def test_the_file_of_a_driver_counts_in_its_own_folder_alone(here: Path) -> None:
    """A copy of a run that is being trained is not being trained; one more path to it is."""
    run = Storage(str(here / "runs" / "stem"))
    with own_run(run, lost=pytest.fail):
        shutil.copytree(here / "runs" / "stem", here / "runs" / "copy")
        (here / "link").symlink_to(here / "runs" / "stem")
        with own_run(Storage(str(here / "runs" / "copy")), lost=pytest.fail):
            pass
        owner = read_owner(Storage(str(here / "link")))
        assert owner
        assert not owner.released
        with (
            pytest.raises(UserError, match="driven by"),
            own_run(Storage(str(here / "link")), lost=pytest.fail),
        ):
            pytest.fail("two drivers of one run")


@pytest.fixture(scope="module")
def recorded(ray_local: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with its record in MLflow; its folder."""
    folder = tmp_path_factory.mktemp("recorded")
    write_data_set(folder / "data", samples=100, held_out=20)
    recipe = tiny_recipe(folder / "data", folder / "runs", steps=STEPS, name="one")
    train(Recipe.model_validate(recipe), show=lambda event: None)
    return folder / "runs" / "one"


def mlflow_run(run: Path) -> str:
    identity = read_identity(Storage(str(run)))
    assert identity
    assert identity.mlflow_run_id
    return identity.mlflow_run_id


@pytest.fixture
def client(recorded: Path) -> MlflowClient:
    return MlflowClient(tracking_uri(None, Storage(str(recorded.parent))))


def resume(run: Path) -> list[str]:
    """Continues a run, as `train --resume` does; returns its warnings."""
    told: list[str] = []
    result = train(
        read_resumed_recipe(Storage(str(run))),
        show=lambda event: told.append(str(getattr(event, "text", ""))),
    )
    assert (result.run_dir, result.steps) == (str(run), STEPS)
    return told


def test_a_run_is_where_its_folder_is(recorded: Path, client: MlflowClient) -> None:
    """Copied: an MLflow run of its own, which says so; moved: the same; reached by a link: the
    same."""
    first = mlflow_run(recorded)
    history = client.get_metric_history(first, "train/loss")
    copy = Path(shutil.copytree(recorded, recorded.parent / "copy"))
    assert any(f"a copy of {recorded}; it gets a new MLflow run" in line for line in resume(copy))
    second = mlflow_run(copy)
    assert second != first
    assert client.get_run(second).data.tags["run_dir"] == str(copy)
    losses = [metric.value for metric in client.get_metric_history(second, "train/loss")]
    assert losses == [metric.value for metric in history]
    assert len(client.get_metric_history(first, "train/loss")) == len(history)

    moved = copy.rename(recorded.parent / "moved")
    assert not any("a copy of" in line for line in resume(moved))
    assert mlflow_run(moved) == second
    info = client.get_run(second)
    assert (info.info.run_name, info.data.tags["run_dir"]) == ("moved", str(moved))

    (recorded.parent / "link").symlink_to(moved)
    assert not any("a copy of" in line for line in resume(recorded.parent / "link"))
    assert mlflow_run(moved) == second
    assert mlflow_run(recorded) == first, "the original is as it was"
    assert json.loads((recorded / "run.json").read_text(encoding="utf-8"))["name"] == "one"
