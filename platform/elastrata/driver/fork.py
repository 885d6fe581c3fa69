"""The plan of a fork: its checkpoint, its differences from the parent, and obstacles."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from elastrata.checkpoints.commit import Commit, file_problems, list_commits
from elastrata.checkpoints.state import model_sizes
from elastrata.parallel.init_weights import meta_model
from elastrata.recipe.data_sets import remove_epoch_limits, resolve_steps
from elastrata.recipe.recipe import PhaseKeys, Recipe
from elastrata.run.claim import check_folder, check_parent, find_run_folder
from elastrata.run.consistency import is_begun
from elastrata.run.folder import (
    RUN_FILE,
    RunIdentity,
    flatten,
    read_identity,
    read_resumed_recipe,
    read_summary,
)
from elastrata.run.fork import Fork, samples_after_step
from elastrata.run.history import read_lineage
from elastrata.step.schedule import DecayConfig
from elastrata.trainer.preflight import TrainingData, find_training_data, mask_problems
from elastrata_pipelines.errors import UserError, pluralize
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.storage import Storage

# `begin_with` has no effect: a fork has its parent's weights.
_ELSEWHERE = ("name", "storage", "begin_with")
"""Keys that are not listed as changes: every fork has its own ones, or does not use them."""
_LEARNED = {"batch_size", "batch_size_warmup", "optimizer", "schedule", "sparsity"}
"""Keys of a phase that decide the result of its steps, wherever its data is now."""
_DECAY = ("schedule", "schedule.decay", "schedule.decay.steps", "schedule.decay.ratio")


_PREPARATION = re.compile(r"(phases\.\d+\.)?data\.prepare[.=]")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A difference between a fork and its parent."""

    what: str
    """A key of the recipe, or a description."""
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class ForkPlan:
    """A fork that can be started, and its differences from the parent."""

    fork: Fork
    changes: tuple[Change, ...]


def plan_fork(wanted: str, name: str, overrides: Sequence[str] = ()) -> ForkPlan:
    """Check that a run can be forked and return the plan. Writes nothing.

    Args:
        wanted: `RUN` or `RUN@STEP`, with the run's folder, URL or name; default: its newest
            checkpoint.
        name: name of the fork.
        overrides: changes of the parent's recipe, as `dotted.path=value`.

    Raises:
        UserError: one line for each problem.
    """
    if name_overrides := [one for one in overrides if one.startswith("name=")]:
        raise UserError(f"{name_overrides[0]}: unexpected: --name {name} names the fork")
    if preparation_overrides := [one for one in overrides if _PREPARATION.match(one)]:
        advice = "unexpected: a fork uses existing data sets, which `elastrata prepare` makes"
        raise UserError(*(f"{one}: {advice}" for one in preparation_overrides))
    parent, commit = _find_parent(wanted)
    identity = read_identity(parent)
    assert identity is not None, wanted
    before = resolve_steps(read_resumed_recipe(parent))
    recipe = resolve_steps(read_resumed_recipe(parent, [*overrides, f'name="{name}"']))
    recipe = recipe.model_copy(update={"begin_with": None})
    run = Storage(recipe.storage).sub(name)
    if fork_problems := [*_name_problems(run), *_recipe_problems(before, recipe, commit, parent)]:
        raise UserError(*fork_problems)
    is_decay_given = any(one.partition("=")[0].endswith(_DECAY) for one in overrides)
    # An explicit decay is the user's decision, even if it makes the learning rate jump.
    recipe = recipe if is_decay_given else _start_decay_at(commit.step, before, recipe)
    data = find_training_data(remove_epoch_limits(recipe))
    fork_problems = [*mask_problems(recipe), *_model_problems(parent, commit, recipe, data)]
    if fork_problems:
        raise UserError(*fork_problems)
    fork = Fork(
        run=run,
        recipe=recipe,
        data=data.data_sets,
        parent=parent,
        commit=commit,
        positions=_read_positions(parent, identity, commit, recipe, data),
        fresh_optimizer=before.optimizer.name != recipe.optimizer.name,
    )
    # Mixtures continue from the origin, which is known only now.
    fork = replace(fork, mixtures=find_training_data(recipe, fork.origin).mixtures)
    return ForkPlan(fork=fork, changes=tuple(_list_changes(before, recipe, fork)))


def _find_parent(wanted: str) -> tuple[Storage, Commit]:
    """Return the run to fork and its checkpoint, which is intact."""
    folder, slash, last = wanted.rpartition("/")
    # Only the last part: the user of a URL may contain an @, too.
    name, at, step = last.rpartition("@")
    parent = find_run_folder(f"{folder}{slash}{name}" if at and name else wanted)
    checkpoints, lineage = parent.sub("checkpoints"), read_lineage(parent.sub("history"))
    saved = [one for one in list_commits(checkpoints) if lineage.counts(*one.place)]
    if not saved:
        raise UserError(f"{checkpoints.uri()}: the run has no checkpoint to fork from")
    commit = _find_step(saved, wanted, step) if at and name else saved[0]
    if damaged := file_problems(checkpoints, commit):
        raise UserError(f"checkpoint {checkpoints.uri(commit.folder)}: {damaged[0]}")
    return parent, commit


def _find_step(saved: Sequence[Commit], wanted: str, step: str) -> Commit:
    by_step = {str(commit.step): commit for commit in reversed(saved)}
    if step in by_step:
        return by_step[step]
    steps = ", ".join(sorted(by_step, key=int))
    if not step.isdecimal():
        raise UserError(f"{wanted}: expected RUN@STEP, with one of the steps {steps}")
    nearest = min(map(int, by_step), key=lambda one: abs(one - int(step)))
    raise UserError(
        f"{wanted}: no checkpoint of step {step}; the nearest is {nearest}, of the steps {steps}"
    )


def _name_problems(run: Storage) -> Iterator[str]:
    name = run.uri().rpartition("/")[2]
    if run.exists(RUN_FILE):
        yield f"--name: {name}: {run.uri()} is a run; `elastrata train --resume` continues it"
    elif is_begun(run):
        yield (
            f"--name: {name}: {run.uri()} has checkpoints or a history but no {RUN_FILE}, as after "
            "an interrupted fork; delete it, or choose another name"
        )
    else:
        try:
            check_folder(run, "run", key="--name")
            check_parent(Storage(run.uri().rpartition("/")[0]))
        except UserError as error:
            yield from error.problems


def _recipe_problems(
    before: Recipe, recipe: Recipe, commit: Commit, parent: Storage
) -> Iterator[str]:
    """Yield the reasons why a fork of that checkpoint cannot have that recipe."""
    step, where = commit.step, parent.uri()
    if recipe.steps_in_all <= step:
        key = "phases" if recipe.phases else "steps"
        yield (
            f"{key}: {recipe.steps_in_all}: expected more steps than {step}, which the parent has "
            "completed"
        )
        return
    old, new = (flatten(one.model_dump(mode="json")["workload"]) for one in (before, recipe))
    for key in sorted(old.keys() | new.keys()):
        # The kind of attention kernel does not change the model.
        if key != "attention" and old.get(key) != new.get(key):
            yield (
                f"workload.{key}: {_format(new.get(key))}: expected {_format(old.get(key))}, as in "
                f"{where}: a fork continues the same model"
            )
    yield from _done_phase_problems(before, recipe, step, where)
    old_sparsity, new_sparsity = (_find_phase(one, step)[0].sparsity for one in (before, recipe))
    if old_sparsity != new_sparsity:
        yield (
            f"sparsity: expected as in {where} at step {step}, whose masks carry over; later "
            "phases may differ"
        )


def _done_phase_problems(before: Recipe, recipe: Recipe, step: int, where: str) -> Iterator[str]:
    """Yield lines about changes in phases that the parent has completed, which would have no
    effect, and about a phase that would end before the steps that the parent has done of it."""
    first = 0
    for number, part in enumerate(recipe.phases):
        end = first + part.num_steps
        old, old_first = _find_phase(before, first)
        if end > step:
            return
        place = f"phases.{number}"
        if before.phases and (old_first != first or end != old_first + old.num_steps):
            done_steps = min(step, old_first + old.num_steps) - old_first
            expected = (
                f"more than {done_steps}" if old_first + old.num_steps > step else str(done_steps)
            )
            yield (
                f"{place}.steps: {part.num_steps}: expected {pluralize(expected, 'step')}: the "
                f"parent, {where}, "
                f"has completed {done_steps} of this phase"
            )
            return
        old_values, new_values = (
            flatten(one.model_dump(mode="json", include=_LEARNED)) for one in (old, part)
        )
        for key in sorted(old_values.keys() | new_values.keys()):
            if old_values.get(key) != new_values.get(key) and not key.startswith("data.prepare"):
                yield (
                    f"{place}.{key}: {_format(new_values.get(key))}: expected "
                    f"{_format(old_values.get(key))}, as in {where}, which has completed this phase"
                )
        first = end


def _model_problems(
    parent: Storage, commit: Commit, recipe: Recipe, data: TrainingData
) -> Iterator[str]:
    """Yield lines if the data changes the shape of the model."""
    checkpoints = parent.sub("checkpoints")
    saved = model_sizes(checkpoints, commit)
    seq_len = max(phase.batches.manifest.seq_len for phase in data.phases)
    model = meta_model(lambda: recipe.workload.build_model(data.vocabulary, seq_len))
    needed = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    other_shapes = sorted(key for key in needed if saved.get(key, needed[key]) != needed[key])
    yield from _tokenizer_problems(parent, data)
    for name in other_shapes[:1]:
        yield (
            f"data.path: {data.train.url}: its tokenizer or longest sample changes the shape of "
            f"the model: {name} has shape {needed[name]}, but {saved[name]} in checkpoint "
            f"{checkpoints.uri(commit.folder)}"
        )


def _tokenizer_problems(parent: Storage, data: TrainingData) -> Iterator[str]:
    """Yield a line if the data was prepared with another tokenizer, as far as the parent's data
    still exists."""
    identity = read_identity(parent)
    for data_set in identity.data if identity else ():
        manifest = Manifest.find(Storage(data_set.url))
        # The folder may have been deleted, or prepared anew.
        if manifest is None or manifest.fingerprint != data_set.fingerprint:
            continue
        if manifest.tokenizer_fingerprint != data.train.manifest.tokenizer_fingerprint:
            yield (
                f"data.path: {data.train.url}: prepared with another tokenizer than "
                f"{data_set.url}, the data set of the parent"
            )
            return


def _find_phase(recipe: Recipe, step: int) -> tuple[PhaseKeys, int]:
    """Return the phase that does the step after `step`, or the last one; and the number of steps
    before that phase."""
    before = 0
    for part in recipe.parts:
        if step < before + part.num_steps:
            return part, before
        before += part.num_steps
    return recipe.parts[-1], before - recipe.parts[-1].num_steps


def _start_decay_at(step: int, parent: Recipe, recipe: Recipe) -> Recipe:
    """Return the recipe with its decay starting at the fork, if it had started before while the
    parent's had not: otherwise the learning rate would jump."""
    (part, first), (old, old_first) = _find_phase(recipe, step), _find_phase(parent, step)
    schedule, done = part.schedule, step - first
    if schedule.shape != "wsd" or schedule.decay_start(part.num_steps) >= done:
        return recipe
    if old.schedule.shape == "wsd" and old.schedule.decay_start(old.num_steps) < step - old_first:
        return recipe
    decay = DecayConfig(shape=schedule.decay.shape, steps=part.num_steps - done)
    decayed = part.model_copy(update={"schedule": schedule.model_copy(update={"decay": decay})})
    if not recipe.phases:
        return recipe.model_copy(update={"schedule": decayed.schedule})
    phases = tuple(decayed if one is part else one for one in recipe.phases)
    return recipe.model_copy(update={"phases": phases})


def _read_positions(
    parent: Storage, identity: RunIdentity, commit: Commit, recipe: Recipe, data: TrainingData
) -> dict[str, int]:
    """Return the samples already taken of each data set that both runs read in the same order."""
    phases, taken_samples = samples_after_step(
        commit.step, read_summary(parent).phases, identity, parent
    )
    old = {key: (phase.seed, phase.window_stripes) for key, phase in phases.items()}
    new = {
        manifest.fingerprint: (recipe.seed, part.data.window_stripes)
        for part, phase in zip(recipe.parts, data.phases, strict=True)
        for _, manifest in phase.batches.data_sets
    }
    return {key: count for key, count in taken_samples.items() if new.get(key) == old[key]}


def _list_changes(before: Recipe, recipe: Recipe, fork: Fork) -> Iterator[Change]:
    """Yield the differences between the fork and its parent."""
    old, new = (flatten(one.model_dump(mode="json")) for one in (before, recipe))
    for key in sorted(old.keys() | new.keys()):
        if key.partition(".")[0] not in _ELSEWHERE and old.get(key) != new.get(key):
            yield Change(what=key, before=_format(old.get(key)), after=_format(new.get(key)))
    step = fork.commit.step
    rates = [_learning_rate(one, step) for one in (before, recipe)]
    if not math.isclose(*rates, rel_tol=1e-9):
        yield Change(
            what=f"learning rate of step {step + 1}", before=f"{rates[0]:g}", after=f"{rates[1]:g}"
        )
    if fork.fresh_optimizer:
        yield Change(what="optimizer's state", before="", after="reset")
    for data_set in dict.fromkeys(fork.data):
        if data_set.fingerprint not in fork.positions:
            yield Change(what=f"samples of {data_set.url}", before="", after="from the first one")


def _learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate after `step` steps, or the last one."""
    return recipe.learning_rate(min(step, recipe.steps_in_all - 1))


def _format(value: object) -> str:
    return "none" if value is None else str(value)


def show_changes(console: Console, plan: ForkPlan) -> None:
    """Show the checkpoint of the fork, and its changes."""
    fork = plan.fork
    console.print(f"fork of {fork.parent.uri()}, step {fork.commit.step}", markup=False)
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for heading in ("what changes", "from", "to"):
        table.add_column(heading, overflow="fold")
    for change in plan.changes:
        table.add_row(change.what, change.before, change.after)
    if plan.changes:
        console.print(table)
