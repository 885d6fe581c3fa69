"""The rules between keys of a recipe: sizes that each are fine and together impossible."""

from __future__ import annotations

from collections.abc import Iterator

from elastrata.recipe.phase import PhaseKeys
from elastrata.recipe.recipe import Recipe, WorkersConfig
from elastrata.training.evaluate import evaluation_metrics
from elastrata.training.optimizers.adamw import AdamWConfig
from elastrata_pipelines.errors import nearest

Problem = tuple[tuple[str, ...], str]
"""The key to change, and the line about it."""


def cross_field_problems(recipe: Recipe) -> list[Problem]:
    """Everything that cannot work and that the recipe alone tells, without data or cluster."""
    return [
        *_parts(recipe),
        *_phases(recipe),
        *_target(recipe),
        *_replicas(recipe),
        *_virtual_ranks(recipe),
        *_reduction(recipe),
        *_clip(recipe),
    ]


def _parts(recipe: Recipe) -> Iterator[Problem]:
    """What is impossible within a phase."""
    for number, part in enumerate(recipe.parts):
        place = ("phases", str(number)) if recipe.phases else ()
        prefix = "".join(f"{key}." for key in place)
        for path, line in (
            *_steps(part),
            *_batch_size_warmup(part, recipe.workers),
            *_sizes(part, recipe.workers),
        ):
            yield (*place, *path), prefix + line


def _phases(recipe: Recipe) -> Iterator[Problem]:
    """What is impossible from phase to phase."""
    if recipe.phases and recipe.batch_size_warmup:
        yield (
            ("batch_size_warmup",),
            "batch_size_warmup: every phase would have it: expected it inside one of the phases",
        )
    first, windows = recipe.parts[0], dict[str, int]()
    for number, part in enumerate(recipe.phases):
        same = first.optimizer.model_copy(update={"lr": part.optimizer.lr})
        for key, value in part.optimizer.model_dump(mode="json").items():
            expected = same.model_dump(mode="json").get(key)
            if value != expected:
                yield (
                    ("phases", str(number), "optimizer", key),
                    f"phases.{number}.optimizer.{key}: {value}: expected {expected}, as in the "
                    "first phase: the optimizer's state goes on; only lr may change",
                )
        window = windows.setdefault(part.data.path, part.data.window_stripes)
        if part.data.window_stripes != window:
            yield (
                ("phases", str(number), "data", "window_stripes"),
                f"phases.{number}.data.window_stripes: {part.data.window_stripes}: expected "
                f"{window}, as in an earlier phase, whose order this one goes on with",
            )


def _steps(part: PhaseKeys) -> Iterator[Problem]:
    warmup, offset = part.schedule.warmup_steps, part.schedule.warmup_offset
    if warmup - offset >= part.steps:
        more = f" plus warmup_offset ({offset})" if offset else ""
        yield (
            ("schedule", "warmup_steps"),
            f"schedule.warmup_steps: {warmup}: expected fewer than steps ({part.steps}){more}",
        )


def _target(recipe: Recipe) -> Iterator[Problem]:
    target, known = recipe.target, evaluation_metrics(recipe.workload)
    if target is not None and target.metric not in known:
        yield (
            ("target", "metric"),
            f"target.metric: {target.metric!r}: expected one of {', '.join(known)}"
            f"{nearest(target.metric, known)}",
        )


def _batch_size_warmup(part: PhaseKeys, workers: WorkersConfig) -> Iterator[Problem]:
    warmup = part.batch_size_warmup
    if warmup is None:
        return
    if warmup.steps >= part.steps:
        yield (
            ("batch_size_warmup", "steps"),
            f"batch_size_warmup.steps: {warmup.steps}: expected fewer than steps ({part.steps})",
        )
    if not workers.min <= warmup.start < part.batch_size:
        yield (
            ("batch_size_warmup", "start"),
            f"batch_size_warmup.start: {warmup.start}: expected at least workers.min "
            f"({workers.min}) and fewer than batch_size ({part.batch_size})",
        )


def _sizes(part: PhaseKeys, workers: WorkersConfig) -> Iterator[Problem]:
    prepare = part.data.prepare
    if prepare and prepare.seq_len > part.micro_batch_tokens:
        yield (
            ("micro_batch_tokens",),
            f"micro_batch_tokens: {part.micro_batch_tokens}: expected at least "
            f"data.prepare.seq_len ({prepare.seq_len}), the longest sample",
        )
    if part.batch_size < workers.min:
        yield (
            ("batch_size",),
            f"batch_size: {part.batch_size}: expected at least workers.min "
            f"({workers.min}), a sample for every worker",
        )


def _replicas(recipe: Recipe) -> Iterator[Problem]:
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
