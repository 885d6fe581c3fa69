"""`elastrata export`: who can read it, which class loads it, and what is told where it fails."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
import yaml

from elastrata.cli.main import run as run_here
from support.documented import documented_keys
from support.lone_run import lone_run
from support.synthetic import tiny_recipe

GPT = {"name": "gpt", "hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_positions": 48}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def bert(folder: Path) -> Path:
    return lone_run(folder, "bert")


@pytest.fixture(scope="module")
def gpt(folder: Path) -> Path:
    return lone_run(folder, "gpt", workload=GPT)


@pytest.fixture(params=[0o022, 0o027])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def _modes(folder: Path) -> dict[str, int]:
    places = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in places}


def test_an_export_has_the_modes_that_the_umask_asks_for(
    bert: Path, tmp_path: Path, umask: int
) -> None:
    assert run_here(["export", str(bert), "--out", str(tmp_path / "deep" / "model")]) == 0
    modes = _modes(tmp_path / "deep" / "model")
    assert {"config.json", "model.safetensors"} <= modes.keys()
    assert modes.pop(".") == 0o777 & ~umask
    assert set(modes.values()) == {0o666 & ~umask}


def test_a_folder_that_is_there_keeps_its_mode(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model").chmod(0o2750)
    assert run_here(["export", str(bert), "--out", str(tmp_path / "model")]) == 0
    assert _modes(tmp_path / "model")["."] == 0o2750


@pytest.mark.parametrize("kind", ["bert", "gpt"])
def test_the_class_that_is_recommended_loads_all_of_it(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["export", str(request.getfixturevalue(kind)), "--out", str(tmp_path / "model")]
    assert run_here([*command, "--json"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert list(result) == documented_keys("export")
    loader = {"bert": "AutoModelForMaskedLM", "gpt": "AutoModelForCausalLM"}[kind]
    assert result["loader"] == loader
    code = shown.err.splitlines()[1].removeprefix("next     ")
    assert code.startswith(f"from transformers import {loader}; {loader}.from_pretrained(")
    found = getattr(transformers, loader).from_pretrained(result["path"], output_loading_info=True)
    assert not any(found[1].values())


def test_nothing_is_left_of_an_export_that_fails(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = lone_run(folder, "mixed", workload={**GPT, "norm": "rms"})
    assert run_here(["export", str(mixed), "--out", str(tmp_path / "model")]) == 2
    assert "transformers has no such model" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run_here(["export", str(mixed), "--out", str(tmp_path / "empty")]) == 2
    (tmp_path / "file").touch()
    assert run_here(["export", str(mixed), "--out", str(tmp_path / "file" / "model")]) == 2
    assert "/file/model: cannot be written (Not a directory)" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "file"]


@pytest.mark.parametrize("command", ["export", "generate"])
def test_a_workload_that_is_not_installed_is_told(
    command: str, bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for path in bert.iterdir():
        (run / path.name).symlink_to(path)
    (run / "recipe.yaml").unlink()
    recipe = tiny_recipe("data", "runs", workload={"name": "lstm", "hidden_size": 32})
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    options = {"export": ["--out", str(tmp_path / "out")], "generate": ["--prompt", "a"]}
    assert run_here([command, str(run), *options[command]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{run}/recipe.yaml: workload")
    assert "'lstm': no such workload; installed: bert, gpt" in line


def test_what_is_no_language_model_is_told(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(["generate", str(bert), "--prompt", "a"]) == 2
    told = f"{bert}: workload bert: expected a model that predicts the next token, as gpt does"
    assert capsys.readouterr().err.splitlines() == [told]
    for number, config in enumerate(("{}", '{"model_type": "lstm"}', "[", '{"model_type": 3}')):
        exported = tmp_path / str(number)
        exported.mkdir()
        (exported / "config.json").write_text(config)
        assert run_here(["generate", str(exported), "--prompt", "a"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{exported}: config.json: not of a model that transformers knows")
