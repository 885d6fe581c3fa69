"""The rules of `auto`: where a group of workers may not choose."""

from __future__ import annotations

from collections.abc import Iterator

from elastrata.recipe.pipeline_rules import Problem
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError


def automatic_problems(recipe: Recipe) -> Iterator[Problem]:
    """Everything about keys that are `auto` that cannot work."""
    for number, part in enumerate(recipe.parts):
        place = ("phases", str(number)) if recipe.phases else ()
        if part.micro_batch_tokens == "auto" and recipe.parallel.virtual_ranks is not None:
            key = (*place, "micro_batch_tokens")
            yield (
                key,
                f"{'.'.join(key)}: 'auto': expected a number where parallel.virtual_ranks is set, "
                "as the last bits of sums depend on it",
            )
    if recipe.activation_checkpointing == "auto" and recipe.compile:
        yield (
            ("activation_checkpointing",),
            "activation_checkpointing: 'auto': expected none, selective or full with compile, "
            "whose blocks stay as they are compiled",
        )


def fixed_tokens(recipe: Recipe, wanted_by: str) -> int:
    """`micro_batch_tokens` of a recipe without phases that must leave nothing open.

    Args:
        recipe: that has it, or not.
        wanted_by: who needs one value of every key, in words.

    Raises:
        UserError: a key is `auto`; one line for each.
    """
    tokens, problems = recipe.micro_batch_tokens, []
    if tokens == "auto":
        problems.append(f"micro_batch_tokens: 'auto': {wanted_by} needs a number, such as 8192")
    if recipe.activation_checkpointing == "auto":
        line = f"activation_checkpointing: 'auto': {wanted_by} needs none, selective or full"
        problems.append(line)
    if problems or tokens == "auto":
        raise UserError(*problems)
    return tokens
