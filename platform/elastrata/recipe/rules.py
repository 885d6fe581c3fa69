"""Rules between keys of a recipe: combinations of valid values that cannot work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from elastrata.optim.adamw import AdamWConfig
from elastrata.recipe.recipe import LENGTHS, NO_LENGTH, PhaseKeys, Recipe
from elastrata.sparsity.config import TwoFourConfig
from elastrata.sparsity.layers import layer_shapes, sparsity_problems
from elastrata.step.evaluate import evaluation_metrics
from elastrata.workload.workload import stage_problems, tensor_problems
from elastrata_pipelines.errors import UserError, pluralize, suggest_nearest


def cross_field_problems(recipe: Recipe) -> list[Problem]:
    """Return all problems that are visible in the recipe alone, without data or cluster."""
    return [
        *_phase_problems(recipe),
        *_sequence_problems(recipe),
        *_target_problems(recipe),
        *_evaluation_set_problems(recipe),
        *layout_problems(recipe),
        *_virtual_rank_problems(recipe),
        *_reduction_problems(recipe),
        *_gradient_sync_problems(recipe),
        *_clip_problems(recipe),
        *_sparse_phase_problems(recipe),
        *automatic_problems(recipe),
        *memory_problems(recipe),
        *_checkpoint_problems(recipe),
    ]


def _checkpoint_problems(recipe: Recipe) -> Iterator[Problem]:
    config = recipe.checkpoint
    wanted = [
        ("keep_every", config.keep_every or 0),
        *(("keep_steps", n) for n in config.keep_steps),
    ]
    for key, steps in wanted:
        if steps % config.every:
            yield (
                ("checkpoint", key),
                f"checkpoint.{key}: {steps}: expected a multiple of checkpoint.every "
                f"({config.every})",
            )


def _phase_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems within each phase."""
    for number, part in enumerate(recipe.parts):
        place = ("phases", str(number)) if recipe.phases else ()
        prefix = "".join(f"{key}." for key in place)
        for path, line in (
            *_length_problems(part),
            *_batch_size_warmup_problems(part, recipe),
            *_batch_size_problems(part, recipe),
            *mixture_problems(part),
        ):
            yield (*place, *path), prefix + line


def _sequence_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems between phases."""
    if recipe.phases and recipe.batch_size_warmup:
        yield (
            ("batch_size_warmup",),
            "batch_size_warmup: would apply to every phase: expected it inside one of the phases",
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
                    "first phase: the optimizer's state carries over; only lr may change",
                )
        for place in part.data.places.values():
            # The order of a data set depends on its window, and a later phase continues the order.
            window = windows.setdefault(place, part.data.window_stripes)
            if part.data.window_stripes != window:
                yield (
                    ("phases", str(number), "data", "window_stripes"),
                    f"phases.{number}.data.window_stripes: {part.data.window_stripes}: expected "
                    f"{window}, as in an earlier phase, whose order this one continues",
                )


def _length_problems(part: PhaseKeys) -> Iterator[Problem]:
    """Yield problems of a phase's length and warm-up."""
    given = [key for key in LENGTHS if getattr(part, key) is not None]
    if not given:
        yield ("steps",), NO_LENGTH
    for key in given[1:]:
        value = getattr(part, key)
        yield (key,), f"{key}: {value}: not allowed with {given[0]}, which also sets the length"
    warmup, offset = part.schedule.warmup_steps, part.schedule.warmup_offset
    # With `epochs` or `tokens` the steps are unknown until the data is prepared; `resolve_steps`
    # repeats these rules then.
    if part.steps is not None and warmup - offset >= part.steps:
        more = f" plus warmup_offset ({offset})" if offset else ""
        yield (
            ("schedule", "warmup_steps"),
            f"schedule.warmup_steps: {warmup}: expected fewer than steps ({part.steps}){more}",
        )
    yield from _decay_problems(part)


def _decay_problems(part: PhaseKeys) -> Iterator[Problem]:
    """Yield a problem if the decay does not fit between the warm-up and the last step."""
    decay, schedule = part.schedule.decay.steps, part.schedule
    if part.steps is None or decay is None:
        return
    warmup = schedule.warmup(part.steps) - schedule.warmup_offset
    if decay > part.steps - warmup and warmup < part.steps:
        deduction = f" less the warm-up ({warmup})" if warmup else ""
        yield (
            ("schedule", "decay", "steps"),
            f"schedule.decay.steps: {decay}: expected at most steps ({part.steps}){deduction}",
        )


def _target_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem if no evaluation computes the target's metric."""
    target = recipe.target
    # A misspelt metric would otherwise never be reached, and the run would train to its last step.
    metrics = evaluation_metrics(recipe.workload, recipe.evaluation.sets)
    if target is not None and target.metric not in metrics:
        yield (
            ("target", "metric"),
            f"target.metric: {target.metric!r}: expected one of {', '.join(metrics)}"
            f"{suggest_nearest(target.metric, metrics)}",
        )


def _evaluation_set_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each evaluation set whose loss would share its name with another one."""
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
            f"evaluation.sets.{number}.name: {name}: already names {other}; expected another one",
        )


def _batch_size_warmup_problems(part: PhaseKeys, recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of the batch size warm-up."""
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


def _batch_size_problems(part: PhaseKeys, recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of `micro_batch_tokens` and `batch_size`."""
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
            f"every {_batch_share_unit(recipe.parallel.group_size)}",
        )


def _least_samples(recipe: Recipe) -> tuple[int, str]:
    """Return the smallest valid number of samples of a step, and the name of that number."""
    return (
        recipe.workers.min // recipe.parallel.group_size,
        f"workers.min{group_count_suffix(recipe)}",
    )


def _batch_share_unit(group_size: int) -> str:
    """Return the name of the unit that gets a share of a batch."""
    return "worker" if group_size == 1 else "group of workers"


def _virtual_rank_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of keys that make results depend on the number of workers."""
    # Virtual ranks promise bitwise equal results on any number of workers, so every sum needs a
    # fixed order.
    count, workers, tensor = recipe.parallel.virtual_ranks, recipe.workers, recipe.parallel.tensor
    if count is None:
        return
    # A pipeline excludes virtual ranks, so a group consists of the tensor-parallel workers.
    if count < (most := workers.most // tensor):
        name = "workers.max" if tensor == 1 else "workers.max / parallel.tensor"
        yield (
            ("parallel", "virtual_ranks"),
            f"parallel.virtual_ranks: {count}: expected at least {name} ({most}), one for every "
            f"{_batch_share_unit(tensor)}",
        )
    if workers.threads is None:
        yield (
            ("workers", "threads"),
            "workers.threads: None: parallel.virtual_ranks needs a number, such as 1, "
            "because sums depend on it",
        )
    if recipe.parallel.replicate != 1:
        yield (
            ("parallel", "replicate"),
            f"parallel.replicate: {recipe.parallel.replicate!r}: expected 1 if "
            "parallel.virtual_ranks is set, because copies would be summed in another order",
        )
    optimizer = recipe.optimizer
    if not isinstance(optimizer, AdamWConfig):
        yield (
            ("optimizer", "name"),
            f"optimizer.name: {optimizer.name!r}: expected 'adamw' if parallel.virtual_ranks is "
            "set: its update contains no sum over the elements of a weight",
        )
    elif optimizer.fused:
        yield (
            ("optimizer", "fused"),
            "optimizer.fused: True: expected false if parallel.virtual_ranks is set, because "
            "rounding in the fused kernel depends on the sizes of the shards",
        )
    if recipe.clip.method == "bucketwise":
        yield (
            ("clip", "method"),
            "clip.method: 'bucketwise': expected global_norm or none if parallel.virtual_ranks "
            "is set",
        )


def _reduction_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of `reduce_dtype` and `overlap_on_cpu` with virtual ranks or bucketwise
    clipping."""
    parallel = recipe.parallel
    named = []
    if parallel.reduce_dtype != "fp32":
        named.append(("reduce_dtype", repr(parallel.reduce_dtype), "fp32"))
    if parallel.overlap_on_cpu:
        named.append(("overlap_on_cpu", "True", "false"))
    for name, value, wanted in named:
        given = f"parallel.{name}: {value}: expected {wanted} if"
        if parallel.virtual_ranks is not None:
            reason = "parallel.virtual_ranks is set, which sums in a fixed order and in fp32"
            yield ("parallel", name), f"{given} {reason}"
        if recipe.clip.method == "bucketwise":
            reason = "clip.method is bucketwise, which clips every bucket before or after its sum"
            yield ("parallel", name), f"{given} {reason}"


def _gradient_sync_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of `gradient_sync` values other than `step`."""
    parallel = recipe.parallel
    if parallel.gradient_sync == "step":
        return
    reasons = {
        "parallel.virtual_ranks is set, which sums in a fixed order": parallel.virtual_ranks,
        "parallel.overlap_on_cpu is set, which needs one sum per step": parallel.overlap_on_cpu,
        "clip.scope is local, which clips each worker's part of the whole step": recipe.clip.scope
        == "local",
    }
    for reason, applies in reasons.items():
        if applies:
            yield (
                ("parallel", "gradient_sync"),
                f"parallel.gradient_sync: {parallel.gradient_sync!r}: expected step if {reason}",
            )


def _clip_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of local clipping."""
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
            "clip.scope: 'local': expected reduced if parallel.replicate is all: a copy of the "
            "model on a single worker is not clipped before its sum",
        )
    # With as many copies as groups, each copy is on one group, and nothing is summed inside a copy.
    elif replicate > 1 and least <= replicate <= most:
        name = f"workers.min{group_count_suffix(recipe)}"
        yield (
            ("clip", "scope"),
            f"clip.scope: 'local': expected {name} above parallel.replicate ({replicate}): a "
            "copy of the model on a single worker is not clipped before its sum; or scope reduced",
        )


def _sparse_phase_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of sparsity with other keys and with the shapes of layers."""
    if not any(part.sparsity for part in recipe.parts):
        return
    if recipe.average:
        yield (
            ("average",),
            "average: not allowed with sparsity, because an average of weights is zero only if all "
            "of them are",
        )
    if recipe.clip.scope == "local":
        yield (
            ("clip", "scope"),
            "clip.scope: 'local': expected reduced with sparsity, because local clipping happens "
            "before the gradients of zero weights are removed from the sum",
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
    """Yield the reasons why 2:4 kernels cannot run."""
    if recipe.precision != "bf16":
        yield f"expected precision bf16, not {recipe.precision}: the kernels support no other"
    if recipe.parallel.tensor > 1:
        yield (
            f"expected parallel.tensor 1, not {recipe.parallel.tensor}: divided layers "
            "have no kernels"
        )


Problem = tuple[tuple[str, ...], str]
"""The path of the key to change, and the line about it."""


def layout_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of dividing and replicating the model."""
    yield from _tensor_parallel_problems(recipe)
    yield from _pipeline_problems(recipe)
    yield from _group_problems(recipe)
    yield from _replica_problems(recipe)


def _pipeline_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of `parallel.pipeline` and the keys that depend on it."""
    parallel = recipe.parallel
    if parallel.pipeline > 1:
        yield from _pipeline_stage_problems(recipe)
        yield from _micro_batch_problems(recipe)
        yield from _pipeline_combination_problems(recipe)
        return
    for key, value, default in (
        ("virtual_stages", parallel.virtual_stages, 1),
        ("micro_batches", parallel.micro_batches, None),
        ("stage_speeds", parallel.stage_speeds, None),
        ("schedule", parallel.schedule, type(parallel).model_fields["schedule"].default),
    ):
        if value != default:
            yield (
                ("parallel", key),
                f"parallel.{key}: {value}: requires parallel.pipeline of 2 or more",
            )


def _tensor_parallel_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of `parallel.tensor` and `parallel.sequence`."""
    tensor = recipe.parallel.tensor
    if recipe.parallel.sequence and tensor == 1:
        yield (
            ("parallel", "sequence"),
            "parallel.sequence: True: requires parallel.tensor of 2 or more, whose workers divide "
            "the tokens",
        )
    if tensor == 1:
        return
    for line in tensor_problems(recipe.workload, tensor):
        yield ("parallel", "tensor"), line


def _group_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each worker count that is not a multiple of the group size."""
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


def _replica_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem if there are more copies of the model than groups of workers."""
    replicate = recipe.parallel.replicate
    # With `workers.max: auto` the number of workers is unknown until the run starts.
    most = recipe.workers.most // recipe.parallel.group_size
    if replicate != "all" and recipe.workers.max != "auto" and replicate > most:
        name = f"workers.max{group_count_suffix(recipe)}"
        yield (
            ("parallel", "replicate"),
            f"parallel.replicate: {replicate}: expected at most {name} ({most})",
        )


def group_count_suffix(recipe: Recipe) -> str:
    """Return the suffix that turns the name of a worker count into that of a group count."""
    sizes = (("tensor", recipe.parallel.tensor), ("pipeline", recipe.parallel.pipeline))
    return "".join(f" / parallel.{name}" for name, size in sizes if size > 1)


def _pipeline_stage_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of the stages, their speeds and the schedule."""
    parallel = recipe.parallel
    for line in stage_problems(recipe.workload, parallel.pipeline * parallel.virtual_stages):
        yield ("parallel", "pipeline"), line
    speeds = parallel.stage_speeds
    if speeds is not None and len(speeds) != parallel.pipeline:
        yield (
            ("parallel", "stage_speeds"),
            f"parallel.stage_speeds: {list(speeds)}: expected {parallel.pipeline} numbers, one per "
            "worker of the pipeline",
        )
    if parallel.schedule in ("gpipe", "1f1b") and parallel.virtual_stages > 1:
        yield (
            ("parallel", "virtual_stages"),
            f"parallel.virtual_stages: {parallel.virtual_stages}: expected 1 with schedule "
            f"{parallel.schedule}; only interleaved_1f1b and zero_bubble support more",
        )
    if parallel.schedule == "interleaved_1f1b" and parallel.virtual_stages == 1:
        yield (
            ("parallel", "virtual_stages"),
            "parallel.virtual_stages: 1: expected 2 or more with schedule interleaved_1f1b",
        )


def _micro_batch_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of the number of micro-batches in a pipeline."""
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
                f"for each of {pluralize(count, 'micro-batch')} of "
                f"workers.max{group_count_suffix(recipe)} "
                f"({groups}) groups of workers",
            )


def _pipeline_combination_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of keys that a pipeline does not support."""
    parallel, where = recipe.parallel, f"if parallel.pipeline is {recipe.parallel.pipeline}"
    if parallel.virtual_ranks is not None:
        yield (
            ("parallel", "virtual_ranks"),
            f"parallel.virtual_ranks: {parallel.virtual_ranks}: expected null {where}, which sums "
            "in another order",
        )
    if parallel.overlap_on_cpu:
        yield (
            ("parallel", "overlap_on_cpu"),
            f"parallel.overlap_on_cpu: True: expected false {where}, which sums gradients after "
            "all backward passes",
        )
    if parallel.gradient_sync != "step":
        yield (
            ("parallel", "gradient_sync"),
            f"parallel.gradient_sync: {parallel.gradient_sync!r}: expected step {where}, which "
            "sums gradients after all backward passes",
        )
    if parallel.schedule != "zero_bubble":
        return
    if parallel.reshard_after_forward:
        yield (
            ("parallel", "reshard_after_forward"),
            "parallel.reshard_after_forward: True: expected false with parallel.schedule "
            "zero_bubble, which needs a block's parameters again for its weights' gradients",
        )
    if recipe.activation_checkpointing == "selective":
        yield (
            ("activation_checkpointing",),
            "activation_checkpointing: 'selective': expected none or full with parallel.schedule "
            "zero_bubble: it frees what it keeps before the second part of the backward pass",
        )
    if recipe.compile is True:
        yield (
            ("compile",),
            "compile: True: expected false with parallel.schedule zero_bubble: a compiled block's "
            "backward pass cannot be divided; or schedule 1f1b or interleaved_1f1b",
        )


def automatic_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of keys that are `auto`."""
    for number, part in enumerate(recipe.parts):
        place = ("phases", str(number)) if recipe.phases else ()
        if part.micro_batch_tokens == "auto" and recipe.parallel.virtual_ranks is not None:
            key = (*place, "micro_batch_tokens")
            yield (
                key,
                f"{'.'.join(key)}: 'auto': expected a number if parallel.virtual_ranks is set, "
                "because the last bits of sums depend on it",
            )


def require_fixed_tokens(recipe: Recipe, wanted_by: str) -> int:
    """Return `micro_batch_tokens` of a recipe without phases and without `auto` keys.

    Args:
        recipe: recipe to check.
        wanted_by: what needs fixed values, in words.

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


def memory_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of `workers.micro_batch_tokens`."""
    tokens_by_name = recipe.workers.micro_batch_tokens
    if tokens_by_name and recipe.parallel.virtual_ranks is not None:
        yield (
            ("workers", "micro_batch_tokens"),
            f"workers.micro_batch_tokens: {tokens_by_name}: not allowed if "
            "parallel.virtual_ranks is set, because the last bits of sums would depend on the "
            "workers",
        )
    for name, tokens in tokens_by_name.items():
        if expected := _expected_bound(recipe, tokens):
            key = ("workers", "micro_batch_tokens", name)
            yield key, f"{'.'.join(key)}: {tokens}: expected {expected}"


def _expected_bound(recipe: Recipe, tokens: int) -> str:
    """Return the bound that a number of tokens violates; empty if it is valid."""
    numbers = [part.micro_batch_tokens for part in recipe.parts]
    most = max((number for number in numbers if number != "auto"), default=0)
    if "auto" not in numbers and tokens >= most:
        return f"fewer than micro_batch_tokens ({most}), the value for all other workers"
    prepared = [part.data.prepare.seq_len for part in recipe.parts if part.data.prepare]
    if tokens < max(prepared, default=0):
        return f"at least data.prepare.seq_len ({max(prepared)}), the longest sample"
    return ""


def mixture_problems(part: PhaseKeys) -> Iterator[Problem]:
    """Yield the problems of a phase's sources that are visible in the recipe alone."""
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
                    f"data.sources.{number}.{key}: {value}: {pluralize(count, 'source')} have it, "
                    "expected one",
                )
    for key, weights in (("weight", data.weights), ("final_weight", data.final_weights)):
        if weights is not None and not any(weights):
            yield (
                ("data", "sources"),
                f"data.sources: every {key} is 0, of {', '.join(names)}: expected one above 0",
            )
    if data.when_exhausted == "redistribute" and all(
        source.max_epochs is None for source in data.sources
    ):
        yield (
            ("data", "when_exhausted"),
            "data.when_exhausted: 'redistribute': expected max_epochs of one of data.sources: "
            "otherwise no source is ever exhausted",
        )
    if part.epochs is not None:
        yield (
            ("epochs",),
            f"epochs: {part.epochs}: expected steps or tokens: each of data.sources has its own "
            "epochs",
        )
