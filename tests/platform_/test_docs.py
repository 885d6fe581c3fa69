"""The documents: what they say is so."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml

from elastrata.cli.main import app, run
from elastrata.driver.doctor import Finding
from elastrata.driver.prometheus import BY_SET, BY_SOURCE, BY_USE, GAUGES
from elastrata.driver.result import TrainResult
from elastrata.planner.cluster import cluster_schema, read_cluster
from elastrata.recipe.file import load_recipe
from elastrata.recipe.schema import file_keys, key_reference, recipe_keys, recipe_schema
from elastrata.recipe.yaml_reader import available_recipes, parse_yaml
from elastrata.sweeps.config import load_sweep, sweep_schema
from support.command_page import command_page
from support.documented import documented_keys
from support.synthetic import write_data_set

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    ROOT / "platform" / "elastrata" / "cluster" / "RAY_INTERNALS.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
COMMANDS = {
    *(command.callback.__name__ for command in app.registered_commands if command.callback),
    *(group.typer_instance.info.name for group in app.registered_groups if group.typer_instance),
}


def _blocks(document: str, language: str) -> list[str]:
    return re.findall(
        rf"```{language}\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), flags=re.DOTALL
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


def test_every_test_that_is_named_exists() -> None:
    named = {
        name
        for path in DOCUMENTS
        for name in re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8"))
    }
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    assert named <= set(re.findall(r"^def (test_\w+)\(", sources, flags=re.MULTILINE))


def test_python_in_the_docs_imports_what_exists() -> None:
    for document in DOCUMENTS:
        for block in _blocks(str(document), "python"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elastrata"):
                    module = importlib.import_module(node.module or "")
                    for alias in node.names:
                        assert hasattr(module, alias.name), f"{document.name}: {alias.name}"


def test_paths_in_the_docs_exist() -> None:
    """Of modules and tests, as a document names them: `parallel/mesh.py`."""
    files = [str(path) for path in map(Path, _tracked()) if path.suffix == ".py"]
    for document in DOCUMENTS:
        if document.name == "CHANGELOG.md":
            continue  # it also names what has gone
        for name in re.findall(r"`([\w/]+/\w+\.py)`", document.read_text(encoding="utf-8")):
            assert any(file.endswith(name) for file in files), f"{document.name}: {name}"


def _tracked() -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for folder in ("platform", "pipelines", "workloads", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]


def test_every_command_is_documented() -> None:
    readme = re.findall(
        r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert set(readme) == COMMANDS
    sections = re.findall(
        r"^### (\w+)$",
        (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert set(sections) == COMMANDS


def test_the_page_of_commands_is_current() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert page == command_page(), "python tests/support/command_page.py"


def test_every_metric_and_every_kind_of_entry_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "records.md").read_text(encoding="utf-8")
    metrics = {**GAUGES, **BY_SOURCE, **BY_SET, **BY_USE}
    entries = (ROOT / "platform/elastrata/run/entries.py").read_text(encoding="utf-8")
    kinds = re.findall(r'kind: Literal\["(\w+)"\]', entries)
    assert len(metrics) > 10 < len(kinds)
    names = [*(metric.removeprefix("elastrata_") for metric in metrics), *kinds]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_keys_of_train_are_those_of_its_result() -> None:
    assert documented_keys("train") == [field.name for field in fields(TrainResult)]


def test_the_keys_of_inspect_are_those_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data_set(tmp_path, samples=100)
    assert run(["inspect", str(tmp_path), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == documented_keys("inspect")


def test_the_keys_of_a_measurement_are_those_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data_set(tmp_path, samples=100)
    settings = [f"data.path={tmp_path}", "batch_size=8", "workers.threads=1"]
    options = ["--steps", "1", "--warm-up", "0", "--json"]
    threads = torch.get_num_threads()
    assert run(["bench", "step", "bert/tiny", *settings, *options]) == 0
    torch.set_num_threads(threads)
    assert list(json.loads(capsys.readouterr().out)) == documented_keys("bench")


def test_the_keys_of_a_check_are_those_of_a_finding() -> None:
    assert documented_keys("doctor") == ["ok", "checks"]
    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert all(f"`{field.name}`" in text for field in fields(Finding))


def test_the_recipes_in_the_documents_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    readme, guide = _blocks("README.md", "yaml")[0], _blocks("docs/how-to/recipes.md", "yaml")[0]
    (tmp_path / "mine.yaml").write_text(readme, encoding="utf-8")
    (tmp_path / "guide.yaml").write_text(guide, encoding="utf-8")
    assert load_recipe("mine.yaml", ["optimizer.lr=3e-4"]).optimizer.lr == 3e-4
    assert load_recipe("guide.yaml").workload.name == "bert"


def test_the_variant_and_the_overrides_of_the_guide_work(tmp_path: Path) -> None:
    variant = _blocks("docs/how-to/recipes.md", "yaml")[2]
    (tmp_path / "v.yaml").write_text(variant, encoding="utf-8")
    assert load_recipe(str(tmp_path / "v.yaml")).optimizer.lr == yaml.safe_load("0.001")
    command = _blocks("docs/how-to/recipes.md", "sh")[0].split()
    recipe = load_recipe(command[2], command[3:])
    assert (recipe.workers.max, recipe.optimizer.betas[1]) == (8, 0.95)


def test_the_sweep_of_the_guide_loads(tmp_path: Path) -> None:
    (tmp_path / "lr.yaml").write_text(_blocks("docs/how-to/sweeps.md", "yaml")[0], encoding="utf-8")
    command = _blocks("docs/how-to/sweeps.md", "sh")[0].splitlines()[1].partition("#")[0].split()
    sweep = load_sweep(str(tmp_path / command[2]), command[3:])
    assert (sweep.trials, sweep.changes["batch_size"]) == (64, 128)


def test_the_cluster_of_the_guide_loads(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        _blocks("docs/explanation/planner.md", "yaml")[0], encoding="utf-8"
    )
    cluster = read_cluster(str(tmp_path / "cluster.yaml"))
    assert (cluster.devices, cluster.price, cluster.device.network) == (128, 1.8, 25e9)


def test_the_mistakes_of_the_guide_are_told_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "extends: bert/mini\noptimizer: {lrr: 3e-4}\nschedule: {shape: lin}\n", encoding="utf-8"
    )
    assert run(["train", "mine.yaml", "steps=0"]) == 2
    shown = re.findall(
        r"```\n(mine.yaml.*?)```",
        (ROOT / "docs/how-to/recipes.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert sorted(capsys.readouterr().err.splitlines()) == sorted(shown[0].splitlines())


def test_the_reference_of_keys_is_current_and_describes_each() -> None:
    recipe, sweep, cluster = recipe_schema(), sweep_schema(), cluster_schema()
    page = key_reference(recipe, sweep=sweep, cluster=cluster)
    assert (ROOT / "docs" / "reference" / "keys.md").read_text(encoding="utf-8") == page, (
        "elastrata schema --keys --out docs/reference/keys.md"
    )
    keys = [recipe_keys(recipe), file_keys(sweep), file_keys(cluster)]
    least = zip(keys, (150, 25, 8), strict=True)
    assert all(len({key.path for key in found}) > number for found, number in least)
    assert [key.path for found in keys for key in found if not key.description] == []


def _yaml_blocks() -> Iterator[Any]:
    for path in DOCUMENTS:
        for number, block in enumerate(
            re.findall(r"```yaml\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        ):
            value = parse_yaml(block, path.name)
            if value is not None:  # a comment alone
                yield pytest.param(value, id=f"{path.name}-{number}")


@cache
def _validator(schema: Callable[[], dict[str, Any]]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema())


@pytest.mark.parametrize("value", [*_yaml_blocks()])
def test_every_yaml_in_the_docs_is_what_the_schema_says(value: dict[str, Any]) -> None:
    if "space" in value:
        _validator(sweep_schema).validate(value)
    elif {"device", "devices"} & value.keys():
        _validator(cluster_schema).validate(value)
    else:  # a whole recipe, or a part of one, such as a variant says
        whole = value if {"workload", "extends"} & value.keys() else {"extends": "x", **value}
        _validator(recipe_schema).validate(whole)


@pytest.mark.parametrize("name", sorted(available_recipes()))
def test_every_recipe_that_ships_is_what_the_schema_says(name: str) -> None:
    values = parse_yaml(available_recipes()[name].read_text(encoding="utf-8"), name)
    _validator(recipe_schema).validate(values)
