"""The house: what lies where, the public list, and the door to each library."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import elastrata
from elastrata import shipped
from elastrata.cluster.ray_train_internals import PRIVATE_MEMBERS
from elastrata.recipe.yaml_reader import available_recipes
from support.house import FOLDERS, count_lines, largest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "elastrata": ROOT / "platform" / "elastrata",
    "elastrata_pipelines": ROOT / "pipelines" / "elastrata_pipelines",
    "elastrata_workloads": ROOT / "workloads" / "elastrata_workloads",
}

DOORS = {
    "mlflow": {"elastrata.tracking"},
    "ray.data": {
        "elastrata.cluster.ray_train_internals",
        "elastrata.cluster.source",
        "elastrata_pipelines.preparation",
        "elastrata_pipelines.stream",
    },
    "ray.train": {
        "elastrata.cluster.ray_train_internals",
        "elastrata.cluster.worker_group",
        "elastrata.cluster.worker",
        "elastrata_pipelines.stream",
    },
    "ray.tune": {"elastrata.sweeps"},
    "ray._private": {"elastrata.cluster.ray_internals"},
    "ray._raylet": set(),
    "ray.core": {"elastrata.cluster.ray_internals"},
    "ray.train.v2": {"elastrata.cluster.ray_train_internals"},
    "torch.distributed.fsdp._fully_shard": {"elastrata.parallel.fsdp_internals"},
    "torch.distributed.tensor.placement_types": {"elastrata.parallel.fsdp_internals"},
    "torch.distributed.checkpoint": {
        "elastrata.checkpoints",
    },
    "typer": {"elastrata.cli.main", "elastrata.cli"},
    "huggingface_hub": {
        "elastrata.checkpoints.weights_folder",
        "elastrata.run.export",
        "elastrata_pipelines.waits",
    },
    "lm_eval": {"elastrata.inference.evaluation"},
    "matplotlib": {
        "elastrata.driver.result",
        "elastrata.sweeps.plots",
        "elastrata.sweeps.result",
        "elastrata.tracking.plots",
    },
}
"""The modules (with those below them) that may import a library or a part of it."""


def test_platform_is_no_package_and_does_not_hide_pythons_own() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    assert not (ROOT / "tests" / "platform").exists()
    code = "import platform; print(platform.system())"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    )
    assert found.stdout.strip()


def test_every_package_is_typed() -> None:
    assert all((folder / "py.typed").is_file() for folder in SOURCES.values())


def test_the_public_list() -> None:
    assert elastrata.__all__ == [
        "PrepareConfig",
        "Recipe",
        "SweepConfig",
        "SweepResult",
        "TrainResult",
        "UserError",
        "Workload",
        "fork",
        "generate",
        "inspect",
        "load_recipe",
        "load_sweep",
        "prepare",
        "status",
        "sweep",
        "train",
    ]
    for name in elastrata.__all__:
        assert getattr(elastrata, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = elastrata.tarin


@pytest.mark.parametrize("module", ["elastrata", "elastrata.cli.main"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    heavy = ("torch", "ray", "mlflow", "transformers", "pyarrow", "pydantic", "numpy", "yaml")
    code = f"import sys, {module}; print(*(m for m in {heavy!r} if m in sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    assert found.stdout.strip() == ""


def test_recipes_and_cluster_files_are_found_from_the_checkout() -> None:
    assert {"bert/tiny", "bert/base", "bert/quickstart"} <= available_recipes().keys()
    assert all(path.is_file() for path in available_recipes().values())
    assert shipped.cluster_files() == ROOT / "cluster_configs"


def test_every_library_that_is_named_has_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {"".join(c if c.isalnum() or c in "-_" else " " for c in n).split()[0] for n in named}
    assert {name.lower() for name in names} <= {
        name.lower() for name in shipped.constraint_versions()
    }


@cache
def _imports_by_module() -> dict[str, list[str]]:
    return {name: list(_imports(tree)) for name, tree in _modules()}


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _below(name: str, ancestor: str) -> bool:
    return name == ancestor or name.startswith(f"{ancestor}.")


@pytest.mark.parametrize("library", DOORS)
def test_one_library_one_door(library: str) -> None:
    intruders = {
        module
        for module, imported in _imports_by_module().items()
        if any(_below(name, library) for name in imported)
        and not any(_below(module, door) for door in DOORS[library])
    }
    assert intruders == set()


INTERNALS = ("elastrata.cluster.ray_internals", "elastrata.cluster.ray_train_internals")
"""The modules that may name underscore attributes of Ray's objects."""


def test_underscore_attributes_of_ray_stand_in_two_files() -> None:
    """A door that holds imports does not hold attributes: no module that imports Ray, or one of
    these two, names an underscore attribute of anything but itself."""
    found = {
        f"{module}:{node.lineno}: {ast.unparse(node)}"
        for module, tree in _modules()
        if module not in INTERNALS and any(map(_is_of_ray, _imports(tree)))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr)
        if ast.unparse(node.value) not in ("self", "cls", "super()", "os")
    }
    assert found == set()


def test_the_private_members_of_ray_train_are_listed_and_documented() -> None:
    page = (SOURCES["elastrata"] / "cluster" / "RAY_INTERNALS.md").read_text(encoding="utf-8")
    listed = {f"{c.__name__}.{name}" for c, names in PRIVATE_MEMBERS.items() for name in names}
    assert all(f"`{member}`" in page for member in listed)
    (tree,) = (tree for module, tree in _modules() if module == INTERNALS[1])
    ours = {"_controller", "_policy", "_variables"}
    named = {
        name
        for node in ast.walk(tree)
        if re.match("_[^_]", name := str(getattr(node, "attr", getattr(node, "name", ""))))
    }
    assert named - ours == {member.partition(".")[2] for member in listed}


def _is_of_ray(imported: str) -> bool:
    return _below(imported, "ray") or any(_below(imported, module) for module in INTERNALS)


OPENED = {"read_text": 1, "write_text": 2, "open": 2, "fdopen": 3}
"""Calls that open text, and the number of arguments that name an encoding."""


MOST_FILES = {"engine": 216, "pipelines": 59, "workloads": 36}
MOST_LINES = {"engine": 48_500, "pipelines": 12_400, "workloads": 5_200}
"""Of Python; 190 of the engine's files have more than a docstring. Lower these when code goes."""
FEW_LINES = {
    "__main__.py": "makes `python -m elastrata` work",
    "adamw.py": "a file for each optimizer",
    "config.py": "the base of all configurations, which imports nothing of the engine",
    "fsdp_internals.py": "the one door to FSDP2's private parts",
    "installed.py": "imported before torch",
    "job.py": "sent to every process, so that it imports little",
    "leaked_placement_groups.py": "to go when Ray frees them by itself",
    "optimizer.py": "the union of the optimizers",
    "processes.py": "imported at the birth of every process",
    "shipped.py": "reads what the wheel ships",
    "target.py": "a section of the recipe with what it means",
    "job_entrypoint.py": "run by `ray job submit`",
}


def test_the_house_does_not_grow_again() -> None:
    """Who adds a room takes out another one, or raises a limit here and says why."""
    for name, most in MOST_FILES.items():
        sizes = count_lines(FOLDERS[name])
        assert len(sizes) <= most, f"{name}: files"
        assert sum(sizes.values()) <= MOST_LINES[name], f"{name}: lines"
        assert max(sizes.values()) <= 700, largest(sizes, 1)
    engine = count_lines(FOLDERS["engine"])
    small = {file.name for file, lines in engine.items() if lines < 60} - {"__init__.py"}
    assert small == set(FEW_LINES)
    below = Counter(file.parent for file in engine)
    assert max(below.values()) <= 25


def test_text_names_its_encoding() -> None:
    """Ruff's PLW1514 sees a path only if its type is plain, and nothing of other processes."""
    unnamed = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for folder in ("platform", "pipelines", "workloads", "tests", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if re.search(rb"(?<!os\.)open\(|_text\((?!encoding)|text=True", source := path.read_bytes())
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and _opens_text(call) and not _names_encoding(call)
    ]
    assert unnamed == []


def _opens_text(call: ast.Call) -> bool:
    if any(key.arg in ("text", "universal_newlines") for key in call.keywords):
        return "subprocess" in ast.unparse(call.func)
    name = ast.unparse(call.func).rpartition(".")[2]
    if name in ("open", "fdopen"):
        modes = [*call.args, *(key.value for key in call.keywords if key.arg == "mode")]
        texts = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
        return any(re.fullmatch(r"[rwax]\+?t?", str(text)) for text in texts)
    return name in OPENED


def _names_encoding(call: ast.Call) -> bool:
    name = ast.unparse(call.func).rpartition(".")[2]
    keys = {key.arg for key in call.keywords}
    return "encoding" in keys or len(call.args) >= OPENED.get(name, 99)
