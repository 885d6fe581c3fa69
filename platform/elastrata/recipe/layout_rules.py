"""The rules of pipelines: what must go together for a model to be cut into stages."""

from __future__ import annotations

from collections.abc import Iterator

from elastrata.recipe.recipe import Recipe

Problem = tuple[tuple[str, ...], str]
"""The key to change, and the line about it."""


def pipeline_problems(recipe: Recipe) -> Iterator[Problem]:
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
    ):
        if value != usual:
            yield (
                ("parallel", key),
                f"parallel.{key}: {value}: expected parallel.pipeline of 2 or more, whose stages "
                "it is about",
            )


def over_group(recipe: Recipe) -> str:
    """How a number of workers becomes one of groups that compute every sample together."""
    sizes = (("tensor", recipe.parallel.tensor), ("pipeline", recipe.parallel.pipeline))
    return "".join(f" / parallel.{name}" for name, size in sizes if size > 1)


def _stages(recipe: Recipe) -> Iterator[Problem]:
    parallel = recipe.parallel
    for line in recipe.workload.stage_problems(parallel.pipeline * parallel.virtual_stages):
        yield ("parallel", "pipeline"), line
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
