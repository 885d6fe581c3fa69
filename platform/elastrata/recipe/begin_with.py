"""The key `begin_with`: the weights that a run begins with, in place of drawn ones, and their
model, which a recipe need not name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from elastrata.checkpoints.weights_folder import CONFIG, weights_folder
from elastrata.config import Config
from elastrata.recipe.yaml_values import read_stored
from elastrata.workload.hf_mapping import HasCounterpart
from elastrata.workload.installed import installed_workloads
from elastrata.workload.workload import workload_class
from elastrata_pipelines.checked_json import reason
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

_KEY = "begin_with.weights"


class BeginConfig(Config):
    """The weights that a run begins with. A plain text stands for `weights` alone."""

    weights: Annotated[str, Field(min_length=1)]
    """A folder with a model as transformers saves it, local or URL, or its name in the hub; or
    another run, by its folder or URL. `runs/first@12000` is the checkpoint of that step, `@best`
    that with the smallest evaluation loss; default: the newest. Of the hub, `@` names a revision.
    """
    optimizer: bool = False
    """Another run's checkpoint: goes on with the optimizer's state, too. The schedule is the
    recipe's, from its first step."""
    extend_vocabulary: bool = False
    """Where the data set's tokenizer has more ids than the weights, and their ids are the first of
    them: the rows of new ids are drawn. Else that is refused."""

    may_differ: tuple[str, ...] = ()
    """Keys of the workload with another value than the weights were trained with, on purpose, such
    as a rotary base for longer samples. Whatever changes a tensor's shape may not."""

    @property
    def place(self) -> str:
        """The folder, URL or name, without what follows `@`."""
        return self._parts[0]

    @property
    def revision(self) -> str | None:
        """What follows `@`: a checkpoint, or a revision in the hub; None: the newest."""
        return self._parts[1]

    @property
    def _parts(self) -> tuple[str, str | None]:
        parent, slash, last = self.weights.rpartition("/")
        name, at, revision = last.rpartition("@")
        return (f"{parent}{slash}{name}", revision) if at and name else (self.weights, None)


def is_run(place: str) -> bool:
    """Whether a folder or URL is that of a run, and not of a model alone.

    Raises:
        UserError: no file system knows it.
    """
    storage = Storage(place)
    try:
        return any(storage.exists(name) for name in ("run.json", "checkpoints"))
    except Exception as error:  # each kind of store has its own
        raise UserError(f"{place}: cannot be read ({reason(error)})") from None


def _section(value: Any) -> Any:
    return {"weights": value} if isinstance(value, str) else value


BeginWith = Annotated[
    BeginConfig, BeforeValidator(_section, json_schema_input_type=str | BeginConfig)
]


def given_workload(begin: BeginConfig) -> dict[str, Any]:
    """The section `workload` of the model that has these weights.

    Raises:
        UserError: there are none, or no workload that is installed has such a model.
    """
    try:
        if is_run(begin.place):
            return _of_run(Storage(begin.place))
        folder = weights_folder(begin.place, begin.revision)
        return _of_config(folder.config(), folder.storage.uri(CONFIG))
    except UserError as error:
        raise UserError(*(f"{_KEY}: {line}" for line in error.problems)) from None


def _of_run(run: Storage) -> dict[str, Any]:
    try:
        values = read_stored(run, "recipe.yaml")
    except FileNotFoundError:
        raise UserError(f"{run.uri('recipe.yaml')}: missing") from None
    found = values.get("workload") if isinstance(values, Mapping) else None
    if not isinstance(found, dict):
        raise UserError(f"{run.uri('recipe.yaml')}: damaged: no workload")
    return found


def _of_config(config: Any, where: str) -> dict[str, Any]:
    names = sorted(installed_workloads())
    for name in names:
        workload = workload_class(name)
        settings = workload.settings_of(config) if issubclass(workload, HasCounterpart) else None
        if settings is not None:
            return {"name": name, **settings}
    raise UserError(
        f"{where}: a {config.model_type}: no such workload is installed, of {', '.join(names)}"
    )
