"""The launch: one training run, from a recipe to its last checkpoint and its record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

import ray

from elastrata.checkpoints.commit import Commit, list_commits
from elastrata.cluster.channel import open_channel
from elastrata.cluster.node_speeds import find_name_problems
from elastrata.cluster.nodes import has_autoscaler, probe_gpu_nodes
from elastrata.device.capabilities import GpuSupport
from elastrata.driver.driver import RunDriver, is_finished, request_stop
from elastrata.driver.interrupt import Interrupt
from elastrata.driver.model_inspection import num_parameters
from elastrata.driver.ray_session import ray_session
from elastrata.driver.recorder import record_missed_events
from elastrata.driver.result import TrainResult
from elastrata.recipe.data_sets import resolve_steps
from elastrata.recipe.file import to_yaml
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.rules import cross_field_problems
from elastrata.run import history
from elastrata.run.claim import check_folder, check_parent, claim, is_copy
from elastrata.run.consistency import check_continuation, find_commit, go_back, is_begun
from elastrata.run.facts import data_params, recipe_params, start_tags
from elastrata.run.folder import (
    GIVEN_FILE,
    RECIPE_FILE,
    RUN_FILE,
    DataSet,
    ForkOrigin,
    Parent,
    RunIdentity,
    check_same_run,
    read_identity,
    read_recipe,
    write_identity,
)
from elastrata.run.goodput import time_to_target
from elastrata.run.history import HistoryWriter, restore_history
from elastrata.run.ownership import NewestStep, Owner, Ownership, read_owner
from elastrata.step.events import Committed, Event, Launched, Warned
from elastrata.step.records import StepRecord, Stopwatch
from elastrata.step.target import TargetConfig
from elastrata.tracking.tracker import Tracker, open_tracker
from elastrata.trainer.initial_weights import find_parent, keep_rows, place_problems
from elastrata.trainer.preflight import (
    TrainingData,
    check_storage,
    cluster_problems,
    cuda_problems,
    find_training_data,
    mask_problems,
)
from elastrata_pipelines.errors import UserError, pluralize
from elastrata_pipelines.phase import compute_positions_after
from elastrata_pipelines.storage import Storage

# One computes, the other one reads data and runs Ray.
CPUS_OF_A_WORKER = 2
"""CPUs per worker under `workers.max: auto` in a cluster without GPUs."""


def train(
    recipe: Recipe,
    *,
    name: str,
    address: str | None = None,
    show: Callable[[Event], None],
    interrupt: Interrupt | None = None,
    record: Tracker | None = None,
    go_on_from: str | None = None,
) -> TrainResult:
    """Train a recipe to its last step or its target, or continue the run of that name.

    Args:
        recipe: recipe to train.
        name: name of the run, and of its folder in `recipe.storage`.
        address: address of the Ray cluster to join; default: the open session, else a new local
            cluster.
        show: called with every event, in another thread.
        interrupt: lets other code request the end of the run; default: only signals can.
        record: tracker of the run; default: as the recipe says.
        go_on_from: checkpoint of the run to go back to, by its folder's name or its step; default:
            the newest.

    Raises:
        UserError: the run's folder, the recipe, the data or the cluster cannot work.
        TrainingError: training ended early; the message has the reason.
    """
    stopwatch = Stopwatch()
    if problems := [line for _, line in cross_field_problems(recipe)]:
        raise UserError(*problems)
    if problems := mask_problems(recipe):
        raise UserError(*problems)
    # Lengths in epochs or tokens become steps.
    recipe = resolve_steps(recipe)
    root = Storage(recipe.storage)
    run = root.sub(name)
    try:
        data = find_training_data(recipe, _read_fork_origin(run))
    except UserError as error:
        raise UserError(*error.problems, *place_problems(run, recipe)) from None
    for line in list_warnings(recipe, data):
        show(Warned(text=line))
    # Before anything is written or started: a mistake shows within seconds.
    check_storage(root)
    interrupt = interrupt or Interrupt()
    stopwatch.end_phase("preflight")
    Thread(target=_import_ahead, daemon=True).start()
    identity_before = read_identity(run)
    if identity_before and identity_before.parent:
        # The run's recipe has this key, which the recipe of the first command may lack.
        recipe = keep_rows(recipe, data, identity_before.parent.num_ids)
    origin = check_run(run, recipe, data.data_sets, go_on_from, warn=lambda line: _warn(show, line))
    parent = find_parent(run, recipe, data, lambda line: _warn(show, line))
    recipe = keep_rows(recipe, data, parent.num_ids) if parent else recipe
    with _owned(run, interrupt, show, origin) as ownership:
        show = _note_steps(ownership, show)
        identity = read_identity(run)
        # Another command may have started or continued the run during the checks.
        if identity != identity_before:
            raise UserError(f"{run.uri()}: another command has just changed it; try again")
        if identity:
            for commit in list_commits(run.sub("checkpoints"))[:1]:
                # The driver that died may not have written the last lines; the commit has them.
                restore_history(run.sub("history"), commit)
        finished = is_finished(run, steps=recipe.steps_in_all, target=recipe.target)
        stopwatch.end_phase("ownership")
        with ray_session(address):
            stopwatch.end_phase("ray")
            resources = _cluster_resources()
            gpus = gpus_per_worker(recipe, resources)
            support = probe_gpu_nodes() if gpus else {}
            if problems := cuda_problems(gpus, support):
                if all(found.fault for found in support.values()):
                    raise UserError(*problems)
                for line in problems:
                    show(Warned(text=line))
                support = {node: found for node, found in support.items() if not found.fault}
            recipe, chosen = settle_for_cluster(
                recipe, gpus, support, read_recipe(run, identity) if identity else None
            )
            problems = cluster_problems(recipe, gpus, resources)
            problems += find_name_problems(recipe, gpus)
            if problems:
                # An autoscaler may still launch the missing resources.
                if not has_autoscaler():
                    raise UserError(*problems)
                show(Warned(text=f"waiting for nodes: {'; '.join(problems)}"))
            # From here on `workers.max` is a number.
            recipe = with_workers(recipe, gpus, resources)
            channel = open_channel()
            tracker = _open_record(recipe, name, run, identity, data, parent, record, show)
            stopwatch.end_phase("record")
            show(Launched(seconds=stopwatch.seconds, chosen=chosen))
            driver = RunDriver(recipe, run, data, tracker, channel, interrupt, gpus, show, parent)
            # From here on Ctrl-C saves a checkpoint first.
            with interrupt.heard(lambda name: _ask_to_stop(channel, show, name)):
                status = driver.to_end(finished)
    return _to_result(run, recipe.target, tracker.run_id, status)


def gpus_per_worker(recipe: Recipe, resources: Mapping[str, float]) -> float:
    """Return the GPUs that each worker claims.

    Raises:
        UserError: the value is `auto`, and the cluster has yet to launch nodes to derive it from.
    """
    is_auto = recipe.workers.gpus == "auto"
    if is_auto and cluster_problems(recipe, 0.0, resources) and has_autoscaler():
        raise UserError(
            "workers.gpus: auto: the cluster has no nodes for workers yet; "
            "expected a number, 0 for CPUs"
        )
    return recipe.workers.gpus_each(resources.get("GPU", 0.0))


def settle_for_cluster(
    recipe: Recipe, gpus: float, support: Mapping[str, GpuSupport], before: Recipe | None
) -> tuple[Recipe, str]:
    """Return the recipe with values in place of `auto` for precision and compilation, and a line
    that names them; an empty line if neither is `auto`.

    Args:
        recipe: the recipe to train.
        gpus: GPUs per worker.
        support: what PyTorch can do with the GPUs of each node that is there. Nodes that are yet to
            come are assumed to have what most have.
        before: the recipe with which the run was last continued; None for a new run.
    """
    found = recipe.on_device(
        is_gpu=gpus > 0,
        has_bf16=all(one.has_bf16 for one in support.values()),
        can_compile=all(one.can_compile for one in support.values()),
    )
    where = "GPUs" if gpus else "CPUs"
    parts = []
    if recipe.precision == "auto":
        usual, kept = found.used_precision, before.precision if before else "auto"
        if kept in ("auto", usual):
            parts.append(f"precision {usual}")
        else:
            # Another precision would make it another run.
            found = found.model_copy(update={"precision": kept})
            parts.append(f"precision {kept}, as the run began ({usual} for a new run)")
    if recipe.compile == "auto":
        parts.append(f"compile {str(found.compile).lower()}")
    return found, f"auto on {where}: {', '.join(parts)}" if parts else ""


def with_workers(recipe: Recipe, gpus: float, resources: Mapping[str, float]) -> Recipe:
    """Return the recipe with a number as `workers.max`.

    Args:
        recipe: returned unchanged if it already has a number.
        gpus: GPUs per worker.
        resources: resources of the cluster, by Ray's names.

    Raises:
        UserError: another setting of the recipe contradicts that number of workers.
    """
    if recipe.workers.max != "auto":
        return recipe
    most = _max_workers(gpus, recipe.workers.cpus, resources)
    most = min(most, min(part.batch_size for part in recipe.parts))
    most -= most % recipe.parallel.group_size
    workers = recipe.workers.model_copy(update={"max": max(recipe.workers.min, most)})
    numbered = recipe.model_copy(update={"workers": workers})
    if problems := [line for _, line in cross_field_problems(numbered)]:
        raise UserError(*(f"{line} (workers.max: auto is {workers.max} here)" for line in problems))
    return numbered


def _max_workers(gpus: float, cpus: float, resources: Mapping[str, float]) -> int:
    if gpus:
        # The quotient of fractions, such as 0.3 / 0.1, may be just below a whole number.
        return int(resources.get("GPU", 0) / gpus + 1e-9)
    return int(resources.get("CPU", 0) / max(CPUS_OF_A_WORKER, cpus) + 1e-9)


def _read_fork_origin(run: Storage) -> ForkOrigin | None:
    """Return the origin of a fork; None if the run is not a fork or its folder cannot be read."""
    try:
        identity = read_identity(run)
    # `check_run` reports these errors later.
    except (UserError, OSError):
        return None
    return identity.origin if identity else None


def check_run(
    run: Storage,
    recipe: Recipe,
    data_sets: Sequence[DataSet],
    go_on_from: str | None,
    warn: Callable[[str], None],
) -> Commit | None:
    """Check that the run of a folder can be started or continued. Writes nothing.

    Args:
        run: the run's folder.
        recipe: recipe to train.
        data_sets: data sets of the recipe.
        go_on_from: checkpoint to go back to, by its folder's name or its step; None for none.
        warn: called with each warning.

    Returns:
        The checkpoint to go back to; None to continue from the newest one.

    Raises:
        UserError: the folder has another run, or its contents are inconsistent.
    """
    read_owner(run)
    identity = read_identity(run)
    if identity is None and is_begun(run):
        raise UserError(
            f"{run.uri(RUN_FILE)}: missing, but the folder has checkpoints or a history; restore "
            "it, or choose another --name"
        )
    check_folder(run, "run")
    check_parent(Storage(run.uri().rpartition("/")[0]))
    if identity:
        check_same_run(run, identity, recipe, data_sets)
    if go_on_from is not None:
        return find_commit(run, go_on_from)
    check_continuation(run, warn)
    return None


@contextmanager
def _owned(
    run: Storage, interrupt: Interrupt, show: Callable[[Event], None], origin: Commit | None
) -> Iterator[Ownership]:
    """Run the block as the run's only driver, reset to `origin` if that is given."""
    before = read_owner(run)
    with claim(run, "run", lost=interrupt.lose, warn=lambda line: _warn(show, line)) as ownership:
        if origin:
            go_back(run, origin, lambda line: _warn(show, line))
        if before and not before.released:
            _note_death(run, before, show)
        yield ownership


def _note_steps(ownership: Ownership, show: Callable[[Event], None]) -> Callable[[Event], None]:
    """Wrap `show` so that every step is also noted in the ownership file, which `status` reads."""

    def note_and_show(event: Event) -> None:
        if isinstance(event, StepRecord):
            loss = event.loss if math.isfinite(event.loss) else None
            ownership.note(
                NewestStep(step=event.step, samples=event.samples, tokens=event.tokens, loss=loss)
            )
        show(event)

    return note_and_show


def _note_death(run: Storage, before: Owner, show: Callable[[Event], None]) -> None:
    """Record the death of the previous driver as a fault, with the newest step in its ownership
    file."""
    # The step in the ownership file is at most one heartbeat older than the death, and may be in no
    # other record.
    storage, newest_attempt = run.sub("history"), history.next_attempt(run.sub("history")) - 1
    writer = HistoryWriter(storage, newest_attempt, lambda line: _warn(show, line), writer="d")
    fault = {
        "text": f"the driver died ({before})",
        "ranks": [],
        # Its workers may have lived some seconds longer; they write their history at this interval.
        "seconds_unheard": history.PART_SECONDS,
        **({"newest": before.newest.step} if before.newest else {}),
    }
    writer.add("fault", fault)
    writer.flush()


def _warn(show: Callable[[Event], None], line: str) -> None:
    show(Warned(text=line))


def _ask_to_stop(channel: Any, show: Callable[[Event], None], name: str) -> None:
    """Request a stop from a signal's handler, without blocking."""
    request_stop(channel, name)
    show(Warned(text=f"{name}: saving a checkpoint first; interrupt again to stop immediately"))


def _import_ahead() -> None:
    """Import modules that are needed next while Ray starts."""

    # Ray's start leaves a core idle: saves 1 to 2 s.
    import elastrata.cluster.worker_group  # noqa: F401


def _cluster_resources() -> dict[str, float]:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources


def _open_record(
    recipe: Recipe,
    name: str,
    run: Storage,
    identity: RunIdentity | None,
    data: TrainingData,
    parent: Parent | None,
    record: Tracker | None,
    show: Callable[[Event], None],
) -> Tracker:
    """Create the run's folder and its record, or continue them."""

    def is_copied(original: str) -> bool:
        if is_copied_run := is_copy(run, original, _mlflow_run_id):
            line = f"{run.uri()}: a copy of {original}; it gets a new MLflow run"
            _warn(show, line)
        return is_copied_run

    fingerprints = dict.fromkeys(data_set.fingerprint for data_set in data.data_sets)
    size_params = {"model.parameters": num_parameters(recipe.workload, data)}
    origin = identity.origin if identity else None
    recorded_recipe = recipe.without_preparation()
    tracker = record or open_tracker(
        recipe.tracking,
        Storage(recipe.storage),
        run_name=name,
        run_id=identity.mlflow_run_id if identity else None,
        params={
            **recipe_params(recorded_recipe.model_dump(mode="json")),
            **data_params(dict(data.trained_on).values()),
            **size_params,
        },
        tags=start_tags(", ".join(fingerprints), run.uri(), _cluster_resources())
        | (parent.to_tags() if parent else {})
        | (origin.to_tags() if origin else {}),
        inputs=data.inputs,
        is_copy=is_copied,
    )
    tracker.log_artifact(RECIPE_FILE, to_yaml(recorded_recipe).encode())
    if recipe.given is not None:
        tracker.log_artifact(GIVEN_FILE, recipe.given.encode(errors="backslashreplace"))
    new_identity = RunIdentity(
        name=name,
        data=data.data_sets,
        mlflow_run_id=tracker.run_id,
        parent=parent,
        origin=origin,
        mixtures=data.mixtures,
    )
    write_identity(run, new_identity, recipe)
    if identity:
        record_missed_events(
            tracker, history.read_entries(run.sub("history")), _checkpoints(run.sub("checkpoints"))
        )
    return tracker


def _mlflow_run_id(run: Storage) -> str | None:
    identity = read_identity(run)
    return identity.mlflow_run_id if identity else None


def _checkpoints(checkpoints: Storage) -> list[Committed]:
    """Return the existing checkpoints, oldest first."""
    return [
        Committed(
            step=commit.step,
            uri=checkpoints.uri(commit.folder),
            evaluation_loss=commit.evaluation_loss,
        )
        for commit in reversed(list_commits(checkpoints))
    ]


def _to_result(
    run: Storage, target: TargetConfig | None, mlflow_run_id: str, status: str
) -> TrainResult:
    entries = history.read_entries(run.sub("history"))
    last: Mapping[str, Any] = history.effective_steps(entries)[-1]
    return TrainResult(
        run_dir=run.uri(),
        mlflow_run_id=mlflow_run_id,
        steps=last["step"],
        samples_seen=last["samples"],
        tokens_seen=last["tokens"],
        final_loss=last["loss"],
        world_sizes=history.world_sizes(entries),
        status=status,
        target=time_to_target(entries, target) if target else None,
    )


MOST_EPOCHS = 40
"""Epochs over a data set beyond which a run warns about memorisation."""


def list_warnings(recipe: Recipe, data: TrainingData) -> list[str]:
    """Return a line for each setting that works but is probably a mistake."""
    manifests = dict(data.trained_on)
    lines = [
        f"data.path: {url}: {line}"
        for url, manifest in manifests.items()
        for line in recipe.workload.advice(manifest)
    ]
    repeated = find_repetition(recipe, data)
    return [*lines, repeated] if repeated else lines


def find_repetition(recipe: Recipe, data: TrainingData) -> str | None:
    """Return a warning about the most repeated data set, if it is repeated too often."""
    sizes = {url: manifest.samples for url, manifest in data.trained_on}
    phases = [phase.size for phase in data.phases]
    urls = [[url for url, _ in phase.batches.data_sets] for phase in data.phases]
    samples = compute_positions_after(recipe.steps_in_all, phases, urls)
    url = max(samples, key=lambda url: samples[url] / sizes[url])
    epochs = samples[url] / sizes[url]
    if epochs <= MOST_EPOCHS:
        return None
    return (
        f"{pluralize(recipe.steps_in_all, 'step')} go {epochs:,.0f} times through the "
        f"{pluralize(sizes[url], 'sample')} "
        f"of {url}; epochs=3 in the place of steps, or more data, would learn more from it"
    )
