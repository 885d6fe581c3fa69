"""The rules of micro-batches on devices that have less memory than others."""

from __future__ import annotations

from collections.abc import Iterator

from elastrata.recipe.layout_rules import Problem
from elastrata.recipe.recipe import Recipe


def memory_problems(recipe: Recipe) -> Iterator[Problem]:
    """Everything about `workers.micro_batch_tokens` that cannot work."""
    fewer = recipe.workers.micro_batch_tokens
    if fewer and recipe.parallel.virtual_ranks is not None:
        yield (
            ("workers", "micro_batch_tokens"),
            f"workers.micro_batch_tokens: {fewer}: expected none where parallel.virtual_ranks is "
            "set, as the last bits of sums depend on who computes them then",
        )
    for name, tokens in fewer.items():
        if expected := _expected(recipe, tokens):
            key = ("workers", "micro_batch_tokens", name)
            yield key, f"{'.'.join(key)}: {tokens}: expected {expected}"


def _expected(recipe: Recipe, tokens: int) -> str:
    """The bound that a number of tokens is beyond; empty where it is within."""
    numbers = [part.micro_batch_tokens for part in recipe.parts]
    most = max((number for number in numbers if number != "auto"), default=0)
    if "auto" not in numbers and tokens >= most:
        return f"fewer than micro_batch_tokens ({most}), which all others have"
    prepared = [part.data.prepare.seq_len for part in recipe.parts if part.data.prepare]
    if tokens < max(prepared, default=0):
        return f"at least data.prepare.seq_len ({max(prepared)}), the longest sample"
    return ""
