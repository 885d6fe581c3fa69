"""The rules of a mixture: keys of `data.sources` that each are fine and together impossible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from elastrata.recipe.layout_rules import Problem
from elastrata.recipe.phase import PhaseKeys


def mixture_problems(part: PhaseKeys) -> Iterator[Problem]:
    """Everything about a phase's sources that the recipe alone tells."""
    data = part.data
    if not data.sources:
        return
    names, places = Counter(source.name for source in data.sources), Counter(data.places.values())
    for number, (source, place) in enumerate(zip(data.sources, data.places.values(), strict=True)):
        for key, value, count in (
            ("name", source.name, names[source.name]),
            ("path", place, places[place]),
        ):
            if count > 1:
                yield (
                    ("data", "sources", str(number), key),
                    f"data.sources.{number}.{key}: {value}: {count} sources have it, expected one",
                )
    for key, weights in (("weight", data.weights), ("final_weight", data.final_weights)):
        if weights is not None and not any(weights):
            yield (
                ("data", "sources"),
                f"data.sources: every {key} is 0, of {', '.join(names)}: expected one above it",
            )
    if data.when_exhausted == "redistribute" and all(
        source.max_epochs is None for source in data.sources
    ):
        yield (
            ("data", "when_exhausted"),
            "data.when_exhausted: 'redistribute': expected max_epochs of one of data.sources: else "
            "none is exhausted",
        )
    if part.epochs is not None:
        yield (
            ("epochs",),
            f"epochs: {part.epochs}: expected steps or tokens: each of data.sources has its own "
            "epochs",
        )
