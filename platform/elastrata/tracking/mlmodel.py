"""The MLmodel: what MLflow must know of an exported folder to load it.

`mlflow.transformers` would load the model, to save it anew; here the folder stays as it was
written, with what transformers' pipelines leave out. The keys are those that it writes itself.
"""

from __future__ import annotations

import platform
import shutil
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODEL = "model"
"""Where the exported folder lies, beside the files that `write_mlmodel` makes."""
_TOKENIZER = "components/tokenizer"
_PACKAGES = ("torch", "transformers")


def write_mlmodel(folder: Path, exported: Path, *, task: str) -> None:
    """Writes what goes beside an exported folder, which `mlflow.transformers` and `mlflow.pyfunc`
    then load.

    Args:
        folder: to write into.
        exported: transformers loads it.
        task: the pipeline that uses the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow warns of its own type hints when it is imported
        from mlflow.models import Model
        from mlflow.pyfunc import add_to_model

    # Without the id of its record, which MLflow would look up in whatever store is its default.
    model = Model(signature=_texts())
    add: Any = add_to_model  # MLflow does not annotate it
    add(model, loader_module="mlflow.transformers", python_env="python_env.yaml")
    tokenizer = _copy_tokenizer(exported, folder / _TOKENIZER)
    pipeline, loader = _classes(task)
    model.add_flavor(
        "transformers",
        transformers_version=version("transformers"),
        code=None,
        task=task,
        instance_type=pipeline,
        pipeline_model_type=loader,
        source_model_name=MODEL,
        model_binary=MODEL,
        torch_dtype="torch.float32",
        **({"components": ["tokenizer"], "tokenizer_type": "AutoTokenizer"} if tokenizer else {}),
    )
    model.save(folder / "MLmodel")
    _write_environment(folder)


def _texts() -> Any:
    """A text goes in, a text comes out."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    return ModelSignature(inputs=Schema([ColSpec("string")]), outputs=Schema([ColSpec("string")]))


def _classes(task: str) -> tuple[str, str]:
    """The names of the pipeline and of the model's class that transformers has for a task."""
    from transformers.pipelines import check_task

    found: dict[str, Any] = check_task(task)[1]
    implementation = found["impl"]
    name = implementation if isinstance(implementation, str) else implementation.__name__
    return name.rpartition(".")[2], found["pt"][0].__name__


def _copy_tokenizer(exported: Path, folder: Path) -> bool:
    """Copies the tokenizer to where MLflow looks for it; returns whether there is one."""
    files = [path for path in exported.iterdir() if "token" in path.name or path.suffix == ".txt"]
    if not files:
        return False
    folder.mkdir(parents=True)
    for path in files:
        shutil.copy(path, folder)
    return True


def _write_environment(folder: Path) -> None:
    """What the model needs to be loaded elsewhere, as MLflow's own files say it."""
    lines = [f"{name}=={version(name).partition('+')[0]}" for name in ("mlflow", *_PACKAGES)]
    (folder / "requirements.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = f"python: {platform.python_version()}\nbuild_dependencies: []\n"
    dependencies = "dependencies:\n- -r requirements.txt\n"
    (folder / "python_env.yaml").write_text(text + dependencies, encoding="utf-8")
