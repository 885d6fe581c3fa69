"""Whether samples of chosen lengths fit a recipe, told as for a data set of such samples."""

from __future__ import annotations

from elastrata.recipe.data_spec import DataSpec
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest


def check_fits(recipe: Recipe, spec: DataSpec, name: str, histogram: tuple[int, ...]) -> None:
    """Makes sure that the recipe's model and micro-batches can take such samples.

    Args:
        recipe: what would train on them.
        spec: what they are made of.
        name: of the lengths, for the message.
        histogram: `histogram[s]` samples have s tokens, up to the longest.

    Raises:
        UserError: one line for each reason why they cannot.
    """
    longest = len(histogram) - 1
    problems = recipe.workload.problems(_manifest(spec, histogram))
    most = recipe.micro_batch_tokens
    if most != "auto" and longest > most:
        problems.append(
            f"micro_batch_tokens: {most}: --lengths {name} has samples of "
            f"{longest} tokens; expected at least that"
        )
    if problems:
        raise UserError(*problems)


def _manifest(spec: DataSpec, histogram: tuple[int, ...]) -> Manifest:
    """What the manifest of such a data set would say to a workload."""
    return Manifest(
        samples=sum(histogram),
        tokens=sum(length * count for length, count in enumerate(histogram)),
        stripes=0,
        stripe_size=1,
        seq_len=len(histogram) - 1,
        seed=0,
        packing="none",
        pairs=spec.pairs,
        token_dtype="uint32",
        length_histogram=histogram,
        vocabulary=spec.vocabulary,
        tokenizer_fingerprint="",
        sources=(),
        files=(),
    )
