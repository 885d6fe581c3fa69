"""The further held-out data sets of a recipe, looked at before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastrata.core.evaluate import EvaluationConfig
from elastrata_pipelines.batches import Batches
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest, file_problems
from elastrata_pipelines.format.manifest import AGAIN
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class FoundSet:
    """A held-out data set that is there."""

    key: str
    """Of the recipe, that names it."""
    storage: Storage
    manifest: Manifest


def found_sets(config: EvaluationConfig) -> tuple[dict[str, FoundSet], list[str]]:
    """Those of `sets` that are there, by name, and a line for each thing that is wrong."""
    sets, problems = dict[str, FoundSet](), list[str]()
    for number, one in enumerate(config.sets):
        key, storage = f"evaluation.sets.{number}.path", Storage(one.path)
        try:
            manifest = Manifest.read(storage)
            lines = [f"{line}; {AGAIN}" for line in file_problems(storage, manifest)]
            manifest.check_lengths(storage)
        except UserError as error:
            lines = list(error.problems)
        problems += [f"{key}: {line}" for line in lines]
        if not lines:
            sets[one.name] = FoundSet(key=key, storage=storage, manifest=manifest)
    return sets, problems


def set_problems(
    sets: Mapping[str, FoundSet], training: Sequence[Manifest], held_out: Sequence[Batches | None]
) -> Iterator[str]:
    """A line for each thing of the sets that does not go with the data of the run.

    Args:
        sets: by name.
        training: a manifest of each phase's data.
        held_out: what is held out of it, by phase.
    """
    if sets and None in held_out:
        yield (
            "evaluation.sets: nothing is held out of the training data, which they are beside: "
            "prepare with data.prepare.held_out, or give evaluation.path"
        )
    for found in sets.values():
        yield from _unlike(found, training)


def _unlike(found: FoundSet, training: Sequence[Manifest]) -> Iterator[str]:
    for field, called in (
        ("tokenizer_fingerprint", "the tokenizer"),
        ("seq_len", "seq_len"),
        ("pairs", "pairs"),
    ):
        value = getattr(found.manifest, field)
        expected = dict.fromkeys(getattr(manifest, field) for manifest in training)
        if training and value not in expected:
            known = " or ".join(map(str, expected))
            yield (
                f"{found.key}: {found.storage.url}: {called} {value}, expected {known}, as in the "
                "training data"
            )
