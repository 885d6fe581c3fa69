"""Keys beside `phases`: each is what phases take that have none of their own, or is refused; and no
record tells of one that nobody took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastrata.recipe.file import load_recipe, to_yaml
from elastrata.run.folder import (
    RECIPE_FILE,
    DataSet,
    RunIdentity,
    flatten,
    read_resumed_recipe,
    write_identity,
)
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from support.synthetic import tiny_recipe

OTHERS: dict[str, Any] = {
    "data": {"path": "other"},
    "steps": 7,
    "batch_size": 9,
    "micro_batch_tokens": 4096,
    "optimizer": {"lr": 0.5},
    "schedule": {"shape": "cosine"},
    "sparsity": {"method": "two_four"},
}
"""For each key another value than that of `_recipe`."""
TOPS = {
    "data": ("data.path", "mine"),
    "steps": ("steps", 50),
    "batch_size": ("batch_size", 8),
    "micro_batch_tokens": ("micro_batch_tokens", 2048),
    "optimizer": ("optimizer.lr", 0.25),
    "schedule": ("schedule.shape", "constant"),
    "sparsity": ("sparsity", None),
}


def _written(folder: Path, name: str = "r.yaml", **values: Any) -> str:
    recipe = {**tiny_recipe("d", "runs"), **values}
    (folder / name).write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return str(folder / name)


def _refused(path: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(UserError) as refused:
        load_recipe(path, overrides)
    return refused.value.problems


@pytest.mark.parametrize("key", TOPS)
def test_a_key_that_each_phase_has_itself_is_refused(tmp_path: Path, key: str) -> None:
    own = {"steps": 5, key: OTHERS[key]}
    path = _written(tmp_path, steps=None, phases=[own, own])
    dotted, value = TOPS[key]
    text = "null" if value is None else str(value)
    line = f"command line: {dotted}: "
    (told,) = (one for one in _refused(path, f"{dotted}={text}") if one.startswith(line))
    assert told.endswith(
        "unused, because every phase has its own: expected "
        f"phases.0.{dotted} to phases.1.{dotted} instead"
    )


@pytest.mark.parametrize("key", [key for key in TOPS if key not in ("steps", "sparsity")])
def test_a_key_that_one_phase_takes_is_followed(tmp_path: Path, key: str) -> None:
    path = _written(tmp_path, steps=None, phases=[{"steps": 5, key: OTHERS[key]}, {"steps": 5}])
    dotted, value = TOPS[key]
    recipe = load_recipe(path, [f"{dotted}={value}"])
    assert [flatten(part.model_dump(mode="json"))[dotted] == value for part in recipe.phases] == [
        False,
        True,
    ]


def test_in_one_file_it_is_refused_and_names_the_file(tmp_path: Path) -> None:
    path = _written(tmp_path, steps=20, phases=[{"steps": 5}, {"epochs": 5}])
    (line,) = _refused(path)
    assert line.startswith(f"{path}: steps: 20: unused, because every phase")


def test_what_a_base_says_is_replaced_and_told_nowhere(tmp_path: Path) -> None:
    _written(tmp_path, "base.yaml", steps=1000, micro_batch_tokens=2048)
    values = {
        "extends": "base.yaml",
        "phases": [
            {"steps": 5, "micro_batch_tokens": 512},
            {"steps": 6, "micro_batch_tokens": 768},
        ],
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    recipe = load_recipe(str(tmp_path / "r.yaml"))
    assert (recipe.steps, recipe.micro_batch_tokens) == (None, 512)
    assert recipe.steps_in_all == 11
    (tmp_path / "again.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    assert load_recipe(str(tmp_path / "again.yaml"), ["name=r"]) == recipe
    (line,) = _refused(str(tmp_path / "r.yaml"), "steps=9")
    assert line.startswith("command line: steps: 9: unused, because every phase")


def test_a_run_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    """Which wrote down what no phase took."""
    run = Storage(str(tmp_path / "runs" / "r"))
    recipe = load_recipe(_written(tmp_path, steps=None, phases=[{"steps": 5}]))
    write_identity(run, RunIdentity(name="r", data=(DataSet(url="d", fingerprint="f"),)), recipe)
    stored = yaml.safe_load(run.read(RECIPE_FILE))
    run.write(yaml.safe_dump({**stored, "steps": 1000}).encode(), RECIPE_FILE)
    identity = yaml.safe_load(run.read("run.json"))
    for key in ("digest", "recipe_sha256"):
        identity[key] = None
    run.write(json.dumps(identity).encode(), "run.json")
    assert read_resumed_recipe(run).steps is None
    with pytest.raises(UserError, match="steps: 9: unused, because every phase"):
        read_resumed_recipe(run, ["steps=9"])


SOURCES = "[{name: a}, {name: b}]"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["parallel.schedule=gpipe"], "parallel.schedule: gpipe: requires parallel.pipeline of 2"),
        ([f"data.sources={SOURCES}", "data.when_exhausted=redistribute"], "data.when_exhausted: "),
        (["schedule.shape=linear", "schedule.power=2"], "schedule: power (2.0) is for the shape"),
        (["schedule.shape=cosine", "schedule.decay.steps=2"], "schedule: decay is for the shape"),
        (["parallel.sequence=true"], "parallel.sequence: True: requires parallel.tensor of 2"),
        (["parallel.micro_batches=4"], "parallel.micro_batches: 4: requires parallel.pipeline"),
        (["data.weight_by=samples"], "data: weight_by: samples: only with sources"),
        (["optimizer.momentum=0.5"], "optimizer.momentum: 0.5: unknown key"),
        (["clip.scope=local"], "clip.scope: 'local': expected clip.method bucketwise"),
    ],
)
def test_a_setting_of_what_is_not_there_is_refused(
    tmp_path: Path, overrides: list[str], line: str
) -> None:
    told = _refused(_written(tmp_path), *overrides)
    assert any(f": {line}" in one for one in told), told


PREPARE = {
    "sources": [{"paths": "texts"}],
    "tokenizer": {"train": "wordpiece", "vocab_size": 30_522, "lowercase": True},
    "seq_len": 48,
}


@pytest.mark.parametrize("phases", [[], [{"steps": 5}, {"steps": 6, "data": {"path": "other"}}]])
def test_a_record_does_not_say_how_other_data_would_be_made(
    tmp_path: Path, phases: list[dict[str, Any]]
) -> None:
    values = {"data": {"path": "mine", "prepare": PREPARE}, "phases": phases}
    recipe = load_recipe(_written(tmp_path, **values, steps=None if phases else 5))
    assert all(part.data.prepare for part in recipe.parts)
    run = Storage(str(tmp_path / "run"))
    data = tuple(DataSet(url=part.data.path, fingerprint="f") for part in recipe.parts)
    write_identity(run, RunIdentity(name="r", data=data), recipe)
    text = run.read(RECIPE_FILE).decode()
    assert "wordpiece" not in text
    assert "lowercase" not in text
    resumed = read_resumed_recipe(run)
    assert [part.data.prepare for part in (resumed, *resumed.parts)] == [None] * (
        1 + len(recipe.parts)
    )
    assert [part.steps for part in resumed.parts] == [part.steps for part in recipe.parts]
