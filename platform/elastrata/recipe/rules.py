"""The rules between keys of a recipe: sizes that each are fine and together impossible."""

from __future__ import annotations

from collections.abc import Iterator

from elastrata.core.evaluate import evaluation_metrics
from elastrata.core.optimizers.adamw import AdamWConfig
from elastrata.core.sparsity.config import TwoFourConfig
from elastrata.core.sparsity.layers import layer_shapes, sparsity_problems
from elastrata.recipe.layout_rules import Problem, automatic_problems, layout_problems, over_group
from elastrata.recipe.memory_rules import memory_problems
from elastrata.recipe.mixture_rules import mixture_problems
from elastrata.recipe.phase import LENGTHS, NO_LENGTH, PhaseKeys
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import nearest


def cross_field_problems(recipe: Recipe) -> list[Problem]:
    """Everything that cannot work and that the recipe alone tells, without data or cluster."""
    return [
        *_parts(recipe),
        *_phases(recipe),
        *_target(recipe),
        *_sets(recipe),
        *layout_problems(recipe),
        *_virtual_ranks(recipe),
        *_reduction(recipe),
        *_gradient_sync(recipe),
        *_clip(recipe),
        *_sparsity(recipe),
        *automatic_problems(recipe),
        *memory_problems(recipe),
    ]


def _parts(recipe: Recipe) -> Iterator[Problem]:
    """Everything that is impossible within a phase."""
    for number, part in enumerate(recipe.parts):
        place = ("phases", str(number)) if recipe.phases else ()
        prefix = "".join(f"{key}." for key in place)
        for path, line in (
            *_steps(part),
            *_batch_size_warmup(part, recipe),
            *_sizes(part, recipe),
            *mixture_problems(part),
        ):
            yield (*place, *path), prefix + line


def _phases(recipe: Recipe) -> Iterator[Problem]:
    """Everything that is impossible from phase to phase."""
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
        for place in part.data.places.values():
            window = windows.setdefault(place, part.data.window_stripes)
            if part.data.window_stripes != window:
                yield (
                    ("phases", str(number), "data", "window_stripes"),
                    f"phases.{number}.data.window_stripes: {part.data.window_stripes}: expected "
                    f"{window}, as in an earlier phase, whose order this one goes on with",
                )


def _steps(part: PhaseKeys) -> Iterator[Problem]:
    given = [key for key in LENGTHS if getattr(part, key) is not None]
    if not given:
        yield ("steps",), NO_LENGTH
    for key in given[1:]:
        value = getattr(part, key)
        yield (key,), f"{key}: {value}: expected without {given[0]}, which says the length too"
    warmup, offset = part.schedule.warmup_steps, part.schedule.warmup_offset
    if part.steps is not None and warmup - offset >= part.steps:
        more = f" plus warmup_offset ({offset})" if offset else ""
        yield (
            ("schedule", "warmup_steps"),
            f"schedule.warmup_steps: {warmup}: expected fewer than steps ({part.steps}){more}",
        )
    yield from _decay(part)


def _decay(part: PhaseKeys) -> Iterator[Problem]:
    decay, schedule = part.schedule.decay.steps, part.schedule
    if part.steps is None or decay is None:
        return
    warmup = schedule.warmup(part.steps) - schedule.warmup_offset
    if decay > part.steps - warmup and warmup < part.steps:
        beside = f" less the warm-up ({warmup})" if warmup else ""
        yield (
            ("schedule", "decay", "steps"),
            f"schedule.decay.steps: {decay}: expected at most steps ({part.steps}){beside}",
        )


def _target(recipe: Recipe) -> Iterator[Problem]:
    target = recipe.target
    known = evaluation_metrics(recipe.workload, recipe.evaluation.sets)
    if target is not None and target.metric not in known:
        yield (
            ("target", "metric"),
            f"target.metric: {target.metric!r}: expected one of {', '.join(known)}"
            f"{nearest(target.metric, known)}",
        )


def _sets(recipe: Recipe) -> Iterator[Problem]:
    """Sets whose losses would have the name of something else."""
    sources = {source.name for part in recipe.parts for source in part.data.sources}
    names = [one.name for one in recipe.evaluation.sets]
    for number, name in enumerate(names):
        if name in sources:
            other = "a source of the data"
        elif name in names[:number]:
            other = f"sets.{names.index(name)}"
        elif name == "loss":
            other = "the loss itself"
        else:
            continue
        yield (
            ("evaluation", "sets", str(number), "name"),
            f"evaluation.sets.{number}.name: {name}: that of {other}: expected another one",
        )


def _batch_size_warmup(part: PhaseKeys, recipe: Recipe) -> Iterator[Problem]:
    warmup, (least, named) = part.batch_size_warmup, _least_samples(recipe)
    if warmup is None:
        return
    if part.steps is not None and warmup.steps >= part.steps:
        yield (
            ("batch_size_warmup", "steps"),
            f"batch_size_warmup.steps: {warmup.steps}: expected fewer than steps ({part.steps})",
        )
    if not least <= warmup.start < part.batch_size:
        yield (
            ("batch_size_warmup", "start"),
            f"batch_size_warmup.start: {warmup.start}: expected at least {named} "
            f"({least}) and fewer than batch_size ({part.batch_size})",
        )


def _sizes(part: PhaseKeys, recipe: Recipe) -> Iterator[Problem]:
    prepare, (least, named) = part.data.prepare, _least_samples(recipe)
    most = part.micro_batch_tokens
    if prepare and most != "auto" and prepare.seq_len > most:
        yield (
            ("micro_batch_tokens",),
            f"micro_batch_tokens: {most}: expected at least "
            f"data.prepare.seq_len ({prepare.seq_len}), the longest sample",
        )
    if part.batch_size < least:
        yield (
            ("batch_size",),
            f"batch_size: {part.batch_size}: expected at least {named} ({least}), a sample for "
            f"every {_sharing_out(recipe.parallel.group_size)}",
        )


def _least_samples(recipe: Recipe) -> tuple[int, str]:
    """The fewest samples a step may have, and what that number is called."""
    return recipe.workers.min // recipe.parallel.group_size, f"workers.min{over_group(recipe)}"


def _sharing_out(tensor: int) -> str:
    """The name of those among whom a batch is shared out."""
    return "worker" if tensor == 1 else "group of workers"


def _virtual_ranks(recipe: Recipe) -> Iterator[Problem]:
    count, workers, tensor = recipe.parallel.virtual_ranks, recipe.workers, recipe.parallel.tensor
    if count is None:
        return
    if count < (most := workers.most // tensor):
        name = "workers.max" if tensor == 1 else "workers.max / parallel.tensor"
        yield (
            ("parallel", "virtual_ranks"),
            f"parallel.virtual_ranks: {count}: expected at least {name} ({most}), one for every "
            f"{_sharing_out(tensor)}",
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


def _gradient_sync(recipe: Recipe) -> Iterator[Problem]:
    parallel = recipe.parallel
    if parallel.gradient_sync == "step":
        return
    reasons = {
        "parallel.virtual_ranks is set, which adds up in an order": parallel.virtual_ranks,
        "parallel.overlap_on_cpu waits for one sum per step": parallel.overlap_on_cpu,
        "clip.scope is local, which clips a worker's part of the whole step": recipe.clip.scope
        == "local",
    }
    for reason, is_so in reasons.items():
        if is_so:
            yield (
                ("parallel", "gradient_sync"),
                f"parallel.gradient_sync: {parallel.gradient_sync!r}: expected step where {reason}",
            )


def _clip(recipe: Recipe) -> Iterator[Problem]:
    if recipe.clip.scope != "local":
        return
    if recipe.clip.method != "bucketwise":
        yield (
            ("clip", "scope"),
            f"clip.scope: 'local': expected clip.method bucketwise, not {recipe.clip.method}",
        )
    replicate, size = recipe.parallel.replicate, recipe.parallel.group_size
    least, most = recipe.workers.min // size, recipe.workers.most // size
    if replicate == "all":
        yield (
            ("clip", "scope"),
            "clip.scope: 'local': expected reduced where parallel.replicate is all: a copy of the "
            "model on one worker is never clipped before its sum",
        )
    elif replicate > 1 and least <= replicate <= most:
        name = f"workers.min{over_group(recipe)}"
        yield (
            ("clip", "scope"),
            f"clip.scope: 'local': expected {name} above parallel.replicate ({replicate}): a "
            "copy of the model on one worker is never clipped before its sum; or scope reduced",
        )


def _sparsity(recipe: Recipe) -> Iterator[Problem]:
    if not any(part.sparsity for part in recipe.parts):
        return
    if recipe.average:
        yield (
            ("average",),
            "average: expected none with sparsity, as an average of weights is zero only where all "
            "of them are",
        )
    if recipe.clip.scope == "local":
        yield (
            ("clip", "scope"),
            "clip.scope: 'local': expected reduced with sparsity, as a worker's part is clipped "
            "before the gradients of weights at zero are taken out of the sum",
        )
    shapes = layer_shapes(recipe.workload)
    for number, part in enumerate(recipe.parts):
        place = ("phases", str(number)) if recipe.phases else ()
        prefix = "".join(f"{key}." for key in place)
        if part.sparsity:
            for path, line in sparsity_problems(part.sparsity, shapes):
                yield (*place, "sparsity", *path), prefix + line
        if isinstance(part.sparsity, TwoFourConfig) and part.sparsity.kernels:
            for line in _kernel_problems(recipe):
                yield (*place, "sparsity", "kernels"), f"{prefix}sparsity.kernels: true: {line}"


def _kernel_problems(recipe: Recipe) -> Iterator[str]:
    if recipe.precision != "bf16":
        yield f"expected precision bf16, not {recipe.precision}: the kernels have no other"
    if recipe.parallel.tensor > 1:
        yield (
            f"expected parallel.tensor 1, not {recipe.parallel.tensor}: a layer that is divided "
            "has no kernels"
        )
