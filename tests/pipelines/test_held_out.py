"""Held-out data: the manifest of what it was held out of vouches for it, whoever reads it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from elastrata.cli.main import run
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import HELD_OUT, MANIFEST, Manifest, read_held_out
from elastrata_pipelines.inspection import verify
from elastrata_pipelines.preparation.provenance import Provenance
from elastrata_pipelines.preparation.target import Target
from elastrata_pipelines.storage import Storage
from support.synthetic import tiny_recipe, write_data_set

MANIFEST_PATH = f"{HELD_OUT}/{MANIFEST}"
ASKED = Provenance(configuration={}, files={})


def _another(data: Path) -> None:
    shutil.rmtree(data / HELD_OUT)
    write_data_set(data / HELD_OUT, samples=20, seed=7)


def _link_manifest(data: Path) -> None:
    (data / MANIFEST_PATH).unlink()
    (data / MANIFEST_PATH).symlink_to(MANIFEST)


def _link_folder(data: Path) -> None:
    shutil.rmtree(data / HELD_OUT)
    (data / HELD_OUT).symlink_to(HELD_OUT)


def _folder_above(data: Path) -> None:
    shutil.rmtree(data / HELD_OUT)
    (data / HELD_OUT).symlink_to(".")


def _manifest_folder(data: Path) -> None:
    (data / MANIFEST_PATH).unlink()
    (data / MANIFEST_PATH).mkdir()


def _file(data: Path) -> None:
    shutil.rmtree(data / HELD_OUT)
    (data / HELD_OUT).write_text("", encoding="utf-8")


def _pipe(data: Path) -> None:
    (data / MANIFEST_PATH).unlink()
    os.mkfifo(data / MANIFEST_PATH)


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "gone": (lambda data: shutil.rmtree(data / HELD_OUT), "missing, but "),
    "its manifest gone": (lambda data: (data / MANIFEST_PATH).unlink(), "missing, but "),
    "another one": (_another, "not the data that was held out: its checksum is not that in "),
    "the folder above": (_folder_above, "not the data that was held out: its checksum is not"),
    "a link to itself": (_link_manifest, "a link that leads back to itself"),
    "a folder that links to itself": (_link_folder, "a link that leads back to itself"),
    "a folder in its place": (_manifest_folder, "a folder, expected a file"),
    "a file in its place": (_file, "a part of its path is a file, expected a folder"),
    "a pipe in its place": (_pipe, "a device, pipe or socket, expected a file"),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_data_set(tmp_path / "data", samples=60, held_out=20)
    return tmp_path / "data"


@pytest.mark.parametrize("what", BROKEN)
def test_what_was_held_out_is_missed_by_every_reader(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    do_break, line = BROKEN[what]
    do_break(data)
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(tiny_recipe(data, tmp_path / "runs")), encoding="utf-8"
    )
    for command in (["inspect", str(data), "--verify"], ["train", str(tmp_path / "recipe.yaml")]):
        assert run(command) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert line in told
        assert str(data) in told
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match=line):
        Target(Storage(str(data))).prepared("", ASKED, held_out=True, overwrite=False)


def test_a_recipe_may_name_another_one(data: Path, tmp_path: Path) -> None:
    shutil.rmtree(data / HELD_OUT)
    write_data_set(tmp_path / "other", samples=20, seed=7)
    evaluation = {"path": str(tmp_path / "other")}
    recipe = Recipe.model_validate(tiny_recipe(data, "runs", evaluation=evaluation))
    (held_out,) = find_training_data(recipe).held_out
    assert held_out is not None
    assert held_out.url == str(tmp_path / "other")


def test_data_that_nobody_held_out_is_not_taken_for_it(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    manifest = write_data_set(tmp_path, samples=60)
    assert read_held_out(storage, manifest) is None
    write_data_set(tmp_path / HELD_OUT, samples=20, seed=1)
    with pytest.raises(UserError, match="does not say that data was held out; delete this folder"):
        read_held_out(storage, manifest)
    (line,) = verify(storage)
    assert line.startswith(f"{tmp_path}/{MANIFEST_PATH}: {tmp_path}/{MANIFEST} does not say")


def test_version_1_takes_what_is_there(data: Path) -> None:
    storage = Storage(str(data))
    inner = Manifest.read(storage.sub(HELD_OUT))
    outer = Manifest.read(storage).model_copy(update={"version": 1, "held_out": None})
    assert read_held_out(storage, outer) == inner
    shutil.rmtree(data / HELD_OUT)
    assert read_held_out(storage, outer) is None


def test_a_run_knows_its_data_set_by_the_checksum(data: Path) -> None:
    recipe = Recipe.model_validate(tiny_recipe(data, "runs"))
    (data_set,) = find_training_data(recipe).data_sets
    assert f'"checksum": "{data_set.fingerprint}"' in (data / MANIFEST).read_text(encoding="utf-8")
