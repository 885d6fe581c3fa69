"""The folder of a run: what it is called, and what it trains on what."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import yaml

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

if TYPE_CHECKING:  # it imports torch, which `status` and `audit` need not wait for
    from elastrata.recipe.recipe import Recipe

RUN_FILE, RECIPE_FILE = "run.json", "recipe.yaml"

MAY_CHANGE = (
    "name",
    "storage",
    "workers",
    "checkpoint",
    "tracking",
    "evaluation",
    "target",
    "parallel",
    "micro_batch_tokens",
    "activation_checkpointing",
    "compile",
    "workload.attention",
    "data.path",
    "data.prepare",
)
"""Keys of a recipe that a run may be continued with another value of: they change where and how
the same samples are computed on, not what is learned from them."""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set that a run trains on."""

    url: str
    """Absolute path or URL, as the newest launch found it."""
    fingerprint: str
    """Of its manifest."""


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What makes a run the same run after a restart."""

    name: str
    data: tuple[DataSet, ...]
    """That of every phase."""
    mlflow_run_id: str | None = None


def read_identity(run: Storage) -> RunIdentity | None:
    """The identity of the run in that folder; None where there is none yet."""
    if not run.exists(RUN_FILE):
        return None
    values = json.loads(run.read(RUN_FILE))
    return RunIdentity(**{**values, "data": tuple(DataSet(**one) for one in values["data"])})


def write_identity(run: Storage, identity: RunIdentity, recipe: Recipe) -> None:
    """Writes the identity and the recipe of a run."""
    dumped = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    run.write(dumped.encode(), RECIPE_FILE)
    run.write(json.dumps(asdict(identity), indent=1).encode(), RUN_FILE)


def read_recipe(run: Storage) -> Recipe:
    """The recipe a run was started or last continued with.

    Raises:
        UserError: it is none here, as where its workload is not installed.
    """
    from pydantic import ValidationError

    from elastrata.recipe.problems import recipe_problems
    from elastrata.recipe.recipe import Recipe
    from elastrata.recipe.yaml_reader import RecipeText

    values = yaml.safe_load(run.read(RECIPE_FILE))
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        text = RecipeText(file=run.uri(RECIPE_FILE), name="", values=values)
        raise UserError(*recipe_problems(error, Recipe, text)) from None


def check_same_run(
    run: Storage, identity: RunIdentity, recipe: Recipe, data: Sequence[DataSet]
) -> None:
    """Refuses to continue a run as another one.

    Args:
        run: its folder.
        identity: what is in it.
        recipe: to go on with.
        data: the data sets of the recipe's phases.

    Raises:
        UserError: the recipe differs in keys that may not change, or the data set is another one.
    """
    # Through the model: keys that came with a later version have their defaults.
    before = flatten(read_recipe(run).model_dump(mode="json"))
    now = flatten(recipe.model_dump(mode="json"))
    problems = [
        f"{run.uri(RECIPE_FILE)}: {key}: {before.get(key)!r} in the run of this name, "
        f"{now.get(key)!r} in this recipe"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _may_change(key)
    ]
    for before_set, data_set in zip(identity.data, data, strict=False):
        if data_set.fingerprint != before_set.fingerprint:
            problems.append(
                f"{data_set.url}: not the data set that run '{identity.name}' trains on"
            )
    if problems:
        advice = f"run '{identity.name}' exists; choose another --name, or give it back its recipe"
        raise UserError(*problems, advice)


def _may_change(key: str) -> bool:
    """Whether a run may be continued with another value under this path, in a phase or outside."""
    bare = re.sub(r"^phases\.\d+\.", "", key)
    return any(bare == part or bare.startswith(f"{part}.") for part in MAY_CHANGE)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A nested dict as dotted paths. Sections in a list go by their number; other lists stay
    values."""
    if isinstance(tree, list) and tree and all(isinstance(item, dict) for item in tree):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
