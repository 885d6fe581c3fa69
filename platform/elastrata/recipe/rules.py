"""The rules between keys of a recipe: sizes that each are fine and together impossible."""

from __future__ import annotations

from collections.abc import Iterator

from elastrata.recipe.recipe import Recipe
from elastrata.training.optimizers.adamw import AdamWConfig

Problem = tuple[tuple[str, ...], str]
"""The key to change, and the line about it."""


def cross_field_problems(recipe: Recipe) -> list[Problem]:
    """Everything that cannot work and that the recipe alone tells, without data or cluster."""
    return [
        *_steps(recipe),
        *_batch_size_warmup(recipe),
        *_sizes(recipe),
        *_virtual_ranks(recipe),
        *_reduction(recipe),
        *_clip(recipe),
    ]


def _steps(recipe: Recipe) -> Iterator[Problem]:
    warmup, offset = recipe.schedule.warmup_steps, recipe.schedule.warmup_offset
    if warmup - offset >= recipe.steps:
        more = f" plus warmup_offset ({offset})" if offset else ""
        yield (
            ("schedule", "warmup_steps"),
            f"schedule.warmup_steps: {warmup}: expected fewer than steps ({recipe.steps}){more}",
        )


def _batch_size_warmup(recipe: Recipe) -> Iterator[Problem]:
    warmup = recipe.batch_size_warmup
    if warmup is None:
        return
    if warmup.steps >= recipe.steps:
        yield (
            ("batch_size_warmup", "steps"),
            f"batch_size_warmup.steps: {warmup.steps}: expected fewer than steps ({recipe.steps})",
        )
    if not recipe.workers.min <= warmup.start < recipe.batch_size:
        yield (
            ("batch_size_warmup", "start"),
            f"batch_size_warmup.start: {warmup.start}: expected at least workers.min "
            f"({recipe.workers.min}) and fewer than batch_size ({recipe.batch_size})",
        )


def _sizes(recipe: Recipe) -> Iterator[Problem]:
    prepare = recipe.data.prepare
    if prepare and prepare.seq_len > recipe.micro_batch_tokens:
        yield (
            ("micro_batch_tokens",),
            f"micro_batch_tokens: {recipe.micro_batch_tokens}: expected at least "
            f"data.prepare.seq_len ({prepare.seq_len}), the longest sample",
        )
    if recipe.batch_size < recipe.workers.min:
        yield (
            ("batch_size",),
            f"batch_size: {recipe.batch_size}: expected at least workers.min "
            f"({recipe.workers.min}), a sample for every worker",
        )
    replicate = recipe.parallel.replicate
    if replicate != "all" and replicate > recipe.workers.max:
        yield (
            ("parallel", "replicate"),
            f"parallel.replicate: {replicate}: expected at most workers.max ({recipe.workers.max})",
        )


def _virtual_ranks(recipe: Recipe) -> Iterator[Problem]:
    count, workers = recipe.parallel.virtual_ranks, recipe.workers
    if count is None:
        return
    key = ("parallel", "virtual_ranks")
    if count < workers.max:
        yield (
            key,
            f"parallel.virtual_ranks: {count}: expected at least workers.max ({workers.max}), one "
            "for every worker",
        )
    if workers.threads is None:
        yield (
            ("workers", "threads"),
            "workers.threads: None: parallel.virtual_ranks needs a number, such as 1, as sums "
            "depend on it",
        )
    if recipe.parallel.replicate != 1:
        yield (
            ("parallel", "replicate"),
            f"parallel.replicate: {recipe.parallel.replicate!r}: expected 1 where "
            "parallel.virtual_ranks is set, as copies would add up in another order",
        )
    optimizer = recipe.optimizer
    if not isinstance(optimizer, AdamWConfig):
        yield (
            ("optimizer", "name"),
            f"optimizer.name: {optimizer.name!r}: expected 'adamw' where parallel.virtual_ranks is "
            "set, whose update does not add up over a weight",
        )
    elif optimizer.fused:
        yield (
            ("optimizer", "fused"),
            "optimizer.fused: True: expected false where parallel.virtual_ranks is set, as the "
            "fused kernel rounds by the sizes of the shards",
        )
    if recipe.clip.method == "bucketwise":
        yield (
            ("clip", "method"),
            "clip.method: 'bucketwise': expected global_norm or none where parallel.virtual_ranks "
            "is set",
        )


def _reduction(recipe: Recipe) -> Iterator[Problem]:
    parallel = recipe.parallel
    named = []
    if parallel.reduce_dtype != "fp32":
        named.append(("reduce_dtype", repr(parallel.reduce_dtype), "fp32"))
    if parallel.overlap_on_cpu:
        named.append(("overlap_on_cpu", "True", "false"))
    for name, value, wanted in named:
        given = f"parallel.{name}: {value}: expected {wanted} where"
        if parallel.virtual_ranks is not None:
            reason = "parallel.virtual_ranks is set, which adds up in an order and in fp32"
            yield ("parallel", name), f"{given} {reason}"
        if recipe.clip.method == "bucketwise":
            reason = "clip.method is bucketwise, which sees every bucket before or after its sum"
            yield ("parallel", name), f"{given} {reason}"


def _clip(recipe: Recipe) -> Iterator[Problem]:
    if recipe.clip.scope != "local":
        return
    if recipe.clip.method != "bucketwise":
        yield (
            ("clip", "scope"),
            f"clip.scope: 'local': expected clip.method bucketwise, not {recipe.clip.method}",
        )
    replicate, workers = recipe.parallel.replicate, recipe.workers
    if replicate == "all":
        yield (
            ("clip", "scope"),
            "clip.scope: 'local': expected reduced where parallel.replicate is all: a copy of the "
            "model on one worker is never clipped before its sum",
        )
    elif replicate > 1 and workers.min <= replicate <= workers.max:
        yield (
            ("clip", "scope"),
            f"clip.scope: 'local': expected workers.min above parallel.replicate ({replicate}): a "
            "copy of the model on one worker is never clipped before its sum; or scope reduced",
        )
