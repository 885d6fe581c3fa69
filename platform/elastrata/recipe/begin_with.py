"""The key `begin_with`: initial weights of a run, and the model that they imply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from elastrata.checkpoints.weights_folder import CONFIG, find_weights_folder
from elastrata.config import Config
from elastrata.recipe.yaml_values import read_stored
from elastrata.workload.hf_mapping import HasCounterpart, read_settings
from elastrata.workload.installed import find_workloads
from elastrata.workload.workload import workload_class
from elastrata_pipelines.checked_json import describe_error
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

_KEY = "begin_with.weights"


class BeginConfig(Config):
    """Initial weights of a run. A plain text stands for `weights` alone."""

    weights: Annotated[str, Field(min_length=1)]
    """Folder or URL of a run or a transformers model, or a model's name in the hub.
    `runs/first@12000` is the checkpoint of that step, `@best` the one with the smallest evaluation
    loss; default: the newest. In the hub, `@` selects a revision."""
    optimizer: bool = False
    """Whether to also load the optimizer's state of another run's checkpoint. The schedule is the
    recipe's, from its first step."""
    extend_vocabulary: bool = False
    """Whether the data set's tokenizer may have more token ids, after those of the weights; their
    embeddings are initialised at random. false: refused."""

    may_differ: tuple[str, ...] = ()
    """Workload keys that may differ from those that the weights were trained with, such as a rotary
    base for longer samples. Keys that change a tensor's shape may not."""

    @property
    def place(self) -> str:
        """The folder, URL or name without the part after `@`."""
        return self._parts[0]

    @property
    def revision(self) -> str | None:
        """The part after `@`: a checkpoint or a revision in the hub. None means the newest."""
        return self._parts[1]

    @property
    def _parts(self) -> tuple[str, str | None]:
        # Only the last component is split, as URLs contain `@` before a host name as well.
        parent, slash, last = self.weights.rpartition("/")
        name, at, revision = last.rpartition("@")
        return (f"{parent}{slash}{name}", revision) if at and name else (self.weights, None)


def is_run(place: str) -> bool:
    """Return whether a folder or URL contains a run and not only a model.

    Raises:
        UserError: the folder or URL cannot be read.
    """
    storage = Storage(place)
    try:
        return any(storage.exists(name) for name in ("run.json", "checkpoints"))
    # Every storage backend raises different exceptions.
    except Exception as error:
        raise UserError(f"{place}: cannot be read ({describe_error(error)})") from None


def _expand_shorthand(value: Any) -> Any:
    return {"weights": value} if isinstance(value, str) else value


BeginWith = Annotated[
    BeginConfig, BeforeValidator(_expand_shorthand, json_schema_input_type=str | BeginConfig)
]


def read_workload(begin: BeginConfig) -> dict[str, Any]:
    """Return the section `workload` of the model to which the weights belong.

    Raises:
        UserError: the weights are missing, or no installed workload has such a model.
    """
    try:
        if is_run(begin.place):
            return _read_run_workload(Storage(begin.place))
        folder = find_weights_folder(begin.place, begin.revision)
        return _match_workload(folder.config(), folder.storage.uri(CONFIG))
    except UserError as error:
        raise UserError(*(f"{_KEY}: {line}" for line in error.problems)) from None


def _read_run_workload(run: Storage) -> dict[str, Any]:
    try:
        values = read_stored(run, "recipe.yaml")
    except FileNotFoundError:
        raise UserError(f"{run.uri('recipe.yaml')}: missing") from None
    found = values.get("workload") if isinstance(values, Mapping) else None
    if not isinstance(found, dict):
        raise UserError(f"{run.uri('recipe.yaml')}: damaged: no workload")
    return found


def _match_workload(config: Any, where: str) -> dict[str, Any]:
    # Sorted, so that every machine chooses the same of several matching workloads.
    names = sorted(find_workloads())
    for name in names:
        workload = workload_class(name)
        if not issubclass(workload, HasCounterpart):
            continue
        settings = read_settings(workload, config, where)
        if settings is not None:
            return {"name": name, **settings}
    raise UserError(
        f"{where}: a {config.model_type}: no such workload is installed, of {', '.join(names)}"
    )
