"""The models on record: checkpoints, which stay where they are, and exports, which MLflow loads."""

from __future__ import annotations

import platform
import re
import shutil
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

_NOT_IN_NAMES = re.compile(r"[/:.%\"']")
"""MLflow takes none of these in the name of a logged model."""
MODEL = "model"
"""Where the exported folder lies, beside the files that `write_mlmodel` makes."""
_TOKENIZER = "components/tokenizer"
_PACKAGES = ("torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class LoadableModel:
    """An export, to be kept by MLflow. Its folders must stay until they are."""

    path: Path
    """Its folder, which transformers loads."""
    mlmodel: Path
    """The folder of what `write_mlmodel` wrote to go beside it."""
    task: str
    """The pipeline that uses it."""
    checkpoint: str
    """The URI of the checkpoint it was made of."""
    step: int
    metrics: Mapping[str, float]


class Models:
    """Those of one experiment. Its methods raise what MLflow raises, and may be called again.

    Args:
        client: MLflow's.
        uri: of the store.
        experiment_id: of the experiment.
    """

    def __init__(self, client: Any, *, uri: str, experiment_id: str) -> None:
        self._client = client
        # A server takes no path of another machine, a database no id of a model.
        self._is_server = uri.startswith(("http:", "https:"))
        self._experiment_id = experiment_id
        self._recorded: dict[str, str] = {}

    def record_checkpoint(
        self, run_id: str, run_name: str, uri: str, step: int, metrics: Mapping[str, float]
    ) -> None:
        """Records a checkpoint that lies at `uri` as an external model of the run, once."""
        if recorded := self.recorded(run_id, uri):
            self._recorded[uri] = recorded[0]
            return
        tags = {"uri": uri, "mlflow.model.isExternal": "true"}
        model_id = self._create(run_id, f"{run_name}-step-{step}", tags, step, metrics)
        self._client.finalize_logged_model(model_id, "READY")
        self._recorded[uri] = model_id

    def log_export(self, run_id: str, run_name: str, model: LoadableModel) -> str:
        """Keeps an export as a model of the run, an output of it, once; returns its id."""
        found = [
            known
            for known in self._search(run_id)
            if known.tags.get("checkpoint") == model.checkpoint
        ]
        if found and found[0].status == "READY":
            return str(found[0].model_id)
        name, tags = f"{run_name}-{model.task}", {"checkpoint": model.checkpoint}
        model_id = (
            found[0].model_id
            if found
            else self._create(run_id, name, tags, model.step, model.metrics)
        )
        self._client.log_model_artifacts(model_id, str(model.mlmodel))
        self._client.log_model_artifacts(model_id, str(model.path), MODEL)
        self._client.finalize_logged_model(model_id, "READY")
        if run_id:
            self._log_output(run_id, model_id, model.step)
        return str(model_id)

    def log_output(self, run_id: str, uri: str, step: int) -> None:
        """Makes a recorded checkpoint an output of the run."""
        for model_id in self.recorded(run_id, uri)[:1]:
            self._recorded[uri] = model_id
            self._log_output(run_id, model_id, step)

    def register(self, run_id: str, model_id: str, uri: str, name: str, alias: str | None) -> str:
        """Makes a logged model the newest version of a registered one, once; returns its number.

        Args:
            run_id: of its run.
            model_id: its own.
            uri: of its checkpoint.
            name: of the registered model; made where it is missing.
            alias: moved to that version; None: none is.
        """
        _ensure_registered(self._client, name)
        versions = self._client.search_model_versions(f"name = '{name}'")
        version = next((v for v in versions if v.tags.get("model_id") == model_id), None)
        if version is None:
            version = self._client.create_model_version(
                name,
                source=self._source(model_id),
                run_id=run_id or None,
                # Without a run a database would look the model up in MLflow's default store.
                model_id=model_id if run_id or self._is_server else None,
                tags={"uri": uri, "model_id": model_id},
                await_creation_for=0,
            )
        if alias:
            self._client.set_registered_model_alias(name, alias, version.version)
        return str(version.version)

    def forget(self, run_id: str, uri: str) -> None:
        """Takes the record of a checkpoint that was deleted off the run."""
        for model_id in self.recorded(run_id, uri):
            self._client.delete_logged_model(model_id)

    def keep(self, run_id: str, uris: Collection[str]) -> None:
        """Takes the records of all checkpoints but these off the run."""
        for model in self._search(run_id):
            if "uri" in model.tags and model.tags["uri"] not in uris:
                self._client.delete_logged_model(model.model_id)

    def recorded(self, run_id: str, uri: str) -> list[str]:
        """The ids of the record of a checkpoint; empty where the store has refused it."""
        if uri in self._recorded:
            return [self._recorded.pop(uri)]
        return [m.model_id for m in self._search(run_id) if m.tags.get("uri") == uri]

    def _log_output(self, run_id: str, model_id: str, step: int) -> None:
        known = self._client.get_run(run_id).outputs
        if not known or model_id not in {one.model_id for one in known.model_outputs}:
            self._client.log_outputs(run_id, [model_output(model_id, step)])

    def _source(self, model_id: str) -> str:
        if self._is_server:
            return f"models:/{model_id}"
        model = self._client.get_logged_model(model_id)
        return str(model.tags.get("uri") or model.artifact_location)

    def _create(
        self,
        run_id: str,
        name: str,
        tags: Mapping[str, str],
        step: int,
        metrics: Mapping[str, float],
    ) -> str:
        model = self._client.create_logged_model(
            experiment_id=self._experiment_id,
            name=_NOT_IN_NAMES.sub("-", name),
            source_run_id=run_id or None,
            tags=dict(tags),
            params={"step": str(step), **{key: f"{value:.6g}" for key, value in metrics.items()}},
            model_type="checkpoint" if "uri" in tags else "export",
        )
        return str(model.model_id)

    def _search(self, run_id: str) -> list[Any]:
        if not run_id:
            return []
        found: list[Any] = self._client.search_logged_models(
            [self._experiment_id], filter_string=f"source_run_id = '{run_id}'"
        )
        return found


def _ensure_registered(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def write_mlmodel(folder: Path, exported: Path, *, task: str, dtype: str = "float32") -> None:
    """Writes what goes beside an exported folder, which `mlflow.transformers` and `mlflow.pyfunc`
    then load.

    Args:
        folder: to write into.
        exported: transformers loads it.
        task: the pipeline that uses the model.
        dtype: of its weights.
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
        torch_dtype=f"torch.{dtype}",
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
    """Writes the packages that the model needs elsewhere, as MLflow's own files name them."""
    lines = [f"{name}=={version(name).partition('+')[0]}" for name in ("mlflow", *_PACKAGES)]
    (folder / "requirements.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = f"python: {platform.python_version()}\nbuild_dependencies: []\n"
    dependencies = "dependencies:\n- -r requirements.txt\n"
    (folder / "python_env.yaml").write_text(text + dependencies, encoding="utf-8")


def model_output(model_id: str, step: int) -> Any:
    """The argument of `log_outputs`."""
    from mlflow.entities import LoggedModelOutput

    return LoggedModelOutput(model_id=model_id, step=step)
