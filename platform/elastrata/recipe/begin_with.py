"""The key `begin_with`: the weights that a run begins with, in place of drawn ones."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from elastrata.config import Config
from elastrata_pipelines.checked_json import reason
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


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
