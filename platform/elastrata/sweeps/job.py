"""The job of a sweep's trials: everything that the process of a trial is told beside its point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastrata.recipe.recipe import Recipe
from elastrata.sweeps.domains import Value
from elastrata.sweeps.trial_recipe import BaseRecipe
from elastrata.tracking.store import tracking_uri
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class TrialJob:
    """A value: it can be sent to any process."""

    base: BaseRecipe
    folder: Storage
    """Every trial is a run in it."""
    threads: int
    """Of a worker, where the recipe does not say."""
    metric: str
    told: Mapping[str, int] = field(default_factory=dict)
    """By trial the step of the newest report that the sweep has had of it before."""

    def recipe(self, trial: str, point: Mapping[str, Value]) -> Recipe:
        """The recipe of a trial.

        Raises:
            UserError: its values cannot be.
        """
        recipe = self.base.trial(point)
        workers = recipe.workers
        if workers.threads is None:
            workers = workers.model_copy(update={"threads": self.threads})
        if workers.most > 1:
            workers = workers.model_copy(update={"spares": False})  # a trial is short
        base = self.base.recipe  # in whose storage the record of the whole sweep is
        uri = tracking_uri(base.tracking.uri, Storage(base.storage))
        changed = {
            "name": trial,
            "storage": self.folder.uri(),
            "workers": workers,
            "tracking": recipe.tracking.model_copy(update={"uri": uri}),
        }
        return recipe.model_copy(update=changed)
