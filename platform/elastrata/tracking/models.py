"""Models in MLflow: checkpoints, recorded by reference, and exports, stored to be loaded."""

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
"""Characters that MLflow rejects in the name of a logged model."""
MODEL = "model"
"""Subfolder of the exported folder in the artifacts, next to the files of `write_mlmodel`."""
_TOKENIZER = "components/tokenizer"
_PACKAGES = ("torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class LoadableModel:
    """An export for MLflow to store. Its folders must exist until it is stored."""

    path: Path
    """Its folder, in the format of transformers."""
    mlmodel: Path
    """The folder of the files that `write_mlmodel` wrote."""
    task: str
    """The transformers pipeline for it."""
    checkpoint: str
    """The URI of the exported checkpoint."""
    step: int
    metrics: Mapping[str, float]


class Models:
    """The logged models of one experiment.

    Its methods raise MLflow's errors and may be repeated.

    Args:
        client: MLflow's client.
        uri: URI of the store.
        experiment_id: id of the experiment.
    """

    def __init__(self, client: Any, *, uri: str, experiment_id: str) -> None:
        self._client = client
        # A server rejects paths of another machine as a source, a database rejects model ids.
        self._is_server = uri.startswith(("http:", "https:"))
        self._experiment_id = experiment_id
        # Model ids by URI, which save a search when an output follows its record.
        self._recorded: dict[str, str] = {}

    def record_checkpoint(
        self, run_id: str, run_name: str, uri: str, step: int, metrics: Mapping[str, float]
    ) -> None:
        """Record the checkpoint stored at `uri` once, as an external model of the run."""
        # The outbox repeats an action whose answer was lost.
        if recorded := self.recorded(run_id, uri):
            self._recorded[uri] = recorded[0]
            return
        tags = {"uri": uri, "mlflow.model.isExternal": "true"}
        model_id = self._create(run_id, f"{run_name}-step-{step}", tags, step, metrics)
        self._client.finalize_logged_model(model_id, "READY")
        self._recorded[uri] = model_id

    def log_export(self, run_id: str, run_name: str, model: LoadableModel) -> str:
        """Store an export once, as a model and output of the run; return its id."""
        matches = [
            logged_model
            for logged_model in self._search(run_id)
            if logged_model.tags.get("checkpoint") == model.checkpoint
        ]
        # A status other than READY is left by an upload that was interrupted: repeat it.
        if matches and matches[0].status == "READY":
            return str(matches[0].model_id)
        name, tags = f"{run_name}-{model.task}", {"checkpoint": model.checkpoint}
        model_id = (
            matches[0].model_id
            if matches
            else self._create(run_id, name, tags, model.step, model.metrics)
        )
        self._client.log_model_artifacts(model_id, str(model.mlmodel))
        self._client.log_model_artifacts(model_id, str(model.path), MODEL)
        self._client.finalize_logged_model(model_id, "READY")
        if run_id:
            self._log_output(run_id, model_id, model.step)
        return str(model_id)

    def log_output(self, run_id: str, uri: str, step: int) -> None:
        """Mark a recorded checkpoint as an output of the run."""
        for model_id in self.recorded(run_id, uri)[:1]:
            self._recorded[uri] = model_id
            self._log_output(run_id, model_id, step)

    def register(self, run_id: str, model_id: str, uri: str, name: str, alias: str | None) -> str:
        """Register a logged model once as the newest version of a registered model.

        Args:
            run_id: id of its run; empty if it has none.
            model_id: id of the logged model.
            uri: URI of its checkpoint.
            name: name of the registered model, which is created if it does not exist.
            alias: alias to move to the version; None: no alias is moved.

        Returns:
            The number of the version.
        """
        _ensure_registered(self._client, name)
        versions = self._client.search_model_versions(f"name = '{name}'")
        # The tag identifies the version if the answer to an earlier call was lost.
        version = next((v for v in versions if v.tags.get("model_id") == model_id), None)
        if version is None:
            version = self._client.create_model_version(
                name,
                source=self._source(model_id),
                run_id=run_id or None,
                # Without a run a database would look the model up in MLflow's default store.
                model_id=model_id if run_id or self._is_server else None,
                tags={"uri": uri, "model_id": model_id},
                # A version of a finished model is ready at once; by default the client waits for
                # it.
                await_creation_for=0,
            )
        if alias:
            self._client.set_registered_model_alias(name, alias, version.version)
        return str(version.version)

    def forget(self, run_id: str, uri: str) -> None:
        """Remove the record of a deleted checkpoint from the run."""
        for model_id in self.recorded(run_id, uri):
            self._client.delete_logged_model(model_id)

    def keep(self, run_id: str, uris: Collection[str]) -> None:
        """Remove the records of all other checkpoints from the run."""
        for model in self._search(run_id):
            if "uri" in model.tags and model.tags["uri"] not in uris:
                self._client.delete_logged_model(model.model_id)

    def recorded(self, run_id: str, uri: str) -> list[str]:
        """Return the model ids of a checkpoint's record; empty if the store has refused it."""
        if uri in self._recorded:
            # Removed from the cache, which would otherwise grow with every checkpoint.
            return [self._recorded.pop(uri)]
        return [m.model_id for m in self._search(run_id) if m.tags.get("uri") == uri]

    def _log_output(self, run_id: str, model_id: str, step: int) -> None:
        # Logged only once, as the outbox may repeat the action.
        outputs = self._client.get_run(run_id).outputs
        if not outputs or model_id not in {one.model_id for one in outputs.model_outputs}:
            self._client.log_outputs(run_id, [model_output(model_id, step)])

    def _source(self, model_id: str) -> str:
        """Return the source of a model version."""
        if self._is_server:
            return f"models:/{model_id}"
        # Without a server, the source must be a location that the client can read itself.
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
    """Create a registered model, unless it exists."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        # Creating is the only atomic test for existence.
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def write_mlmodel(folder: Path, exported: Path, *, task: str, dtype: str = "float32") -> None:
    """Write the files that `mlflow.transformers` and `mlflow.pyfunc` need to load an export.

    Args:
        folder: folder to write into.
        exported: the export's folder, in the format of transformers.
        task: the transformers pipeline for the model.
        dtype: the dtype of its weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's import warns about type hints in MLflow
        from mlflow.models import Model
        from mlflow.pyfunc import add_to_model

    # Without the id of the logged model, which MLflow would look up in its default store.
    model = Model(signature=_text_signature())
    add: Any = add_to_model  # not annotated in MLflow
    add(model, loader_module="mlflow.transformers", python_env="python_env.yaml")
    tokenizer = _copy_tokenizer(exported, folder / _TOKENIZER)
    pipeline, loader = _class_names(task)
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


def _text_signature() -> Any:
    """Return the signature of a model from text to text."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    return ModelSignature(inputs=Schema([ColSpec("string")]), outputs=Schema([ColSpec("string")]))


def _class_names(task: str) -> tuple[str, str]:
    """Return the class names of transformers' pipeline and model for a task."""
    from transformers.pipelines import check_task

    task_defaults: dict[str, Any] = check_task(task)[1]
    implementation = task_defaults["impl"]
    name = implementation if isinstance(implementation, str) else implementation.__name__
    return name.rpartition(".")[2], task_defaults["pt"][0].__name__


def _copy_tokenizer(exported: Path, folder: Path) -> bool:
    """Copy the tokenizer to where MLflow looks for it; return whether the export has one."""
    # Tokenizers of several kinds: tokenizer*.json, special_tokens_map.json, vocab.txt, merges.txt.
    files = [path for path in exported.iterdir() if "token" in path.name or path.suffix == ".txt"]
    if not files:
        return False
    folder.mkdir(parents=True)
    for path in files:
        shutil.copy(path, folder)
    return True


def _write_environment(folder: Path) -> None:
    """Write the model's required packages, in files named as MLflow's own."""
    # Local versions such as 2.9+cpu are not on PyPI.
    lines = [f"{name}=={version(name).partition('+')[0]}" for name in ("mlflow", *_PACKAGES)]
    (folder / "requirements.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = f"python: {platform.python_version()}\nbuild_dependencies: []\n"
    dependencies = "dependencies:\n- -r requirements.txt\n"
    (folder / "python_env.yaml").write_text(text + dependencies, encoding="utf-8")


def model_output(model_id: str, step: int) -> Any:
    """Return an element of the argument of MLflow's `log_outputs`."""
    from mlflow.entities import LoggedModelOutput

    return LoggedModelOutput(model_id=model_id, step=step)
