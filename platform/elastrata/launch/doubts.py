"""Doubts: what a run can be trained on, and nobody would want to."""

from __future__ import annotations

from elastrata.recipe.recipe import Recipe
from elastrata.trainer.preflight import TrainingData
from elastrata_pipelines.phase import positions_after

MOST_EPOCHS = 40
"""A data set that is gone through more often than that is learned by heart."""


def doubts(recipe: Recipe, data: TrainingData) -> list[str]:
    """A line for each thing that can be trained, and that nobody would want to."""
    manifests = dict(data.trained_on)
    lines = [
        f"data.path: {url}: {line}"
        for url, manifest in manifests.items()
        for line in recipe.workload.advice(manifest)
    ]
    repeated = repetition(recipe, data)
    return [*lines, repeated] if repeated else lines


def repetition(recipe: Recipe, data: TrainingData) -> str | None:
    """A line about the data set that the run goes through most often, where that is too often."""
    sizes = {url: manifest.samples for url, manifest in data.trained_on}
    phases = [phase.size for phase in data.phases]
    urls = [[url for url, _ in phase.batches.data_sets] for phase in data.phases]
    samples = positions_after(recipe.steps_in_all, phases, urls)
    url = max(samples, key=lambda url: samples[url] / sizes[url])
    epochs = samples[url] / sizes[url]
    if epochs <= MOST_EPOCHS:
        return None
    return (
        f"{recipe.steps_in_all:,} steps go {epochs:,.0f} times through the {sizes[url]:,} samples "
        f"of {url}; epochs=3 in the place of steps, or more data, would learn more from it"
    )
