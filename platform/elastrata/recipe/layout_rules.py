"""The rules of layouts: how a model may be divided and copied, and what may be left open."""

from __future__ import annotations

from collections.abc import Iterator

from elastrata.core.workload import stage_problems, tensor_problems
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError

Problem = tuple[tuple[str, ...], str]
"""The key to change, and the line about it."""


def layout_problems(recipe: Recipe) -> Iterator[Problem]:
    """Everything about dividing and copying a model that cannot work."""
    yield from _tensor(recipe)
    yield from _pipeline(recipe)
    yield from _groups(recipe)
    yield from _replicas(recipe)


def _pipeline(recipe: Recipe) -> Iterator[Problem]:
    """Everything about `parallel.pipeline`, and the keys that go with it, that cannot work."""
    parallel = recipe.parallel
    if parallel.pipeline > 1:
        yield from _stages(recipe)
        yield from _micro_batches(recipe)
        yield from _partners(recipe)
        return
    for key, value, usual in (
        ("virtual_stages", parallel.virtual_stages, 1),
        ("micro_batches", parallel.micro_batches, None),
        ("stage_speeds", parallel.stage_speeds, None),
        ("schedule", parallel.schedule, type(parallel).model_fields["schedule"].default),
    ):
        if value != usual:
            yield (
                ("parallel", key),
                f"parallel.{key}: {value}: expected parallel.pipeline of 2 or more, whose stages "
                "it is about",
            )


def _tensor(recipe: Recipe) -> Iterator[Problem]:
    tensor = recipe.parallel.tensor
    if recipe.parallel.sequence and tensor == 1:
        yield (
            ("parallel", "sequence"),
            "parallel.sequence: True: expected parallel.tensor of 2 or more, whose workers divide "
            "the tokens",
        )
    if tensor == 1:
        return
    for line in tensor_problems(recipe.workload, tensor):
        yield ("parallel", "tensor"), line


def _groups(recipe: Recipe) -> Iterator[Problem]:
    """Workers come in whole groups that compute every sample together."""
    size, workers = recipe.parallel.group_size, recipe.workers
    sizes = (("tensor", recipe.parallel.tensor), ("pipeline", recipe.parallel.pipeline))
    named = " x ".join(f"parallel.{name}" for name, part in sizes if part > 1)
    for key, count in (("min", workers.min), ("max", workers.most)):
        if count % size:
            below, above = count // size * size, -(-count // size) * size
            nearest_counts = f"{below} or {above}" if below else f"{above}"
            yield (
                ("workers", key),
                f"workers.{key}: {count}: expected a multiple of {named} ({size}), such as "
                f"{nearest_counts}",
            )


def _replicas(recipe: Recipe) -> Iterator[Problem]:
    replicate = recipe.parallel.replicate
    most = recipe.workers.most // recipe.parallel.group_size
    if replicate != "all" and recipe.workers.max != "auto" and replicate > most:
        name = f"workers.max{over_group(recipe)}"
        yield (
            ("parallel", "replicate"),
            f"parallel.replicate: {replicate}: expected at most {name} ({most})",
        )


def over_group(recipe: Recipe) -> str:
    """How a number of workers becomes one of groups that compute every sample together."""
    sizes = (("tensor", recipe.parallel.tensor), ("pipeline", recipe.parallel.pipeline))
    return "".join(f" / parallel.{name}" for name, size in sizes if size > 1)


def _stages(recipe: Recipe) -> Iterator[Problem]:
    parallel = recipe.parallel
    for line in stage_problems(recipe.workload, parallel.pipeline * parallel.virtual_stages):
        yield ("parallel", "pipeline"), line
    speeds = parallel.stage_speeds
    if speeds is not None and len(speeds) != parallel.pipeline:
        yield (
            ("parallel", "stage_speeds"),
            f"parallel.stage_speeds: {list(speeds)}: expected {parallel.pipeline} numbers, one for "
            "each of parallel.pipeline",
        )
    if parallel.schedule in ("gpipe", "1f1b") and parallel.virtual_stages > 1:
        yield (
            ("parallel", "virtual_stages"),
            f"parallel.virtual_stages: {parallel.virtual_stages}: expected 1 with schedule "
            f"{parallel.schedule}; several are for interleaved_1f1b and zero_bubble",
        )
    if parallel.schedule == "interleaved_1f1b" and parallel.virtual_stages == 1:
        yield (
            ("parallel", "virtual_stages"),
            "parallel.virtual_stages: 1: expected 2 or more with schedule interleaved_1f1b",
        )


def _micro_batches(recipe: Recipe) -> Iterator[Problem]:
    parallel = recipe.parallel
    count, pipeline = parallel.micro_batch_multiple, parallel.pipeline
    if count % pipeline:
        below, above = count // pipeline * pipeline, -(-count // pipeline) * pipeline
        nearest_counts = f"{below} or {above}" if below else f"{above}"
        yield (
            ("parallel", "micro_batches"),
            f"parallel.micro_batches: {count}: expected a multiple of parallel.pipeline "
            f"({pipeline}), such as {nearest_counts}",
        )
    groups = recipe.workers.most // parallel.group_size
    for number, part in enumerate(recipe.parts):
        place = ("phases", str(number)) if recipe.phases else ()
        if part.batch_size < groups * count:
            key = (*place, "batch_size")
            yield (
                key,
                f"{'.'.join(key)}: {part.batch_size}: expected at least {groups * count}: a sample "
                f"for each of {count} micro-batches of workers.max{over_group(recipe)} "
                f"({groups}) groups of workers",
            )


def _partners(recipe: Recipe) -> Iterator[Problem]:
    parallel, where = recipe.parallel, f"where parallel.pipeline is {recipe.parallel.pipeline}"
    if parallel.virtual_ranks is not None:
        yield (
            ("parallel", "virtual_ranks"),
            f"parallel.virtual_ranks: {parallel.virtual_ranks}: expected null {where}, which adds "
            "up in another order",
        )
    if parallel.overlap_on_cpu:
        yield (
            ("parallel", "overlap_on_cpu"),
            f"parallel.overlap_on_cpu: True: expected false {where}, which sums gradients up after "
            "all backward passes",
        )
    if parallel.gradient_sync != "step":
        yield (
            ("parallel", "gradient_sync"),
            f"parallel.gradient_sync: {parallel.gradient_sync!r}: expected step {where}, which "
            "sums gradients up after all backward passes",
        )
    if parallel.schedule != "zero_bubble":
        return
    if parallel.reshard_after_forward:
        yield (
            ("parallel", "reshard_after_forward"),
            "parallel.reshard_after_forward: True: expected false with parallel.schedule "
            "zero_bubble, which comes back to a block's parameters for its weights' gradients",
        )
    if recipe.activation_checkpointing == "selective":
        yield (
            ("activation_checkpointing",),
            "activation_checkpointing: 'selective': expected none or full with parallel.schedule "
            "zero_bubble: what it keeps is there for one backward pass, not for its two parts",
        )
    if recipe.compile:
        yield (
            ("compile",),
            "compile: True: expected false with parallel.schedule zero_bubble: a compiled block's "
            "backward pass cannot be divided; or schedule 1f1b or interleaved_1f1b",
        )


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
    if recipe.parallel.gradient_sync == "auto":
        line = f"parallel.gradient_sync: 'auto': {wanted_by} needs step or micro_batch"
        problems.append(line)
    if problems or tokens == "auto":
        raise UserError(*problems)
    return tokens
