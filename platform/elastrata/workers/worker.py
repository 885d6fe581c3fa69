"""The worker: what every member of the group does, from the first import to the last checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any, NoReturn

import ray.train
import torch
import torch.distributed as dist

from elastrata.checkpoints.commit import MARKER, Commit, folders
from elastrata.checkpoints.commit_storage import CommitStorage
from elastrata.checkpoints.training_state import load, restore, training_state
from elastrata.recipe.recipe import Recipe
from elastrata.runs import history
from elastrata.runs.unwritten import restore_history
from elastrata.training.data_rank import DataRank, data_rank
from elastrata.training.device import Abilities, abilities, current_device
from elastrata.training.ends import Stopped
from elastrata.training.evaluate import (
    EvaluationConfig,
    evaluate,
    evaluation_due,
    held_out_step,
)
from elastrata.training.optimizer import build_optimizer
from elastrata.training.phases import Phases
from elastrata.training.record import StepRecord
from elastrata.training.request import Act, Request
from elastrata.training.target import TargetConfig, is_over, reached
from elastrata.workers.automatic import CHOSEN, automatic
from elastrata.workers.backoff import patiently
from elastrata.workers.engine import divided_model, missing_here, phase_masks, training_loop
from elastrata.workers.events import Refused, Started, Substituted, Warned
from elastrata.workers.job import Job
from elastrata.workers.keeper import Keeper, Saving
from elastrata.workers.mailbox import Sender
from elastrata.workers.warm import Spares
from elastrata_pipelines.batches import Start
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stream import RankStream

STREAM = "train"
"""The name of the data set that Ray Train hands to the workers."""
SPARES_AFTER_SECONDS = 5.0
"""The imports of spare processes wait so long, to leave the first steps alone."""


def train_worker(config: dict[str, Any]) -> None:
    """Ray Train's entry point: `config["job"]` is the `Job`."""
    job: Job = config["job"]
    sender = Sender(job.mailbox, rank=ray.train.get_context().get_world_rank())
    try:
        _train(job, sender)
    except UserError as error:
        sender.send(Refused(problems=error.problems))
        raise
    finally:
        sender.flush()


def _train(job: Job, sender: Sender) -> None:
    """Continues from the newest state to the last step, or to the target."""
    phases, context = Phases(), ray.train.get_context()
    recipe, manifests = job.recipe, [phase.batches.manifest for phase in job.phases]
    vocabulary = manifests[0].vocabulary
    rank, world_size = context.get_world_rank(), context.get_world_size()
    data = data_rank(rank, world_size, recipe.parallel.tensor, recipe.parallel.pipeline)
    torch.set_num_threads(recipe.workers.threads or _fair_threads(context.get_local_world_size()))
    device = current_device()
    with ThreadPoolExecutor(1) as background:
        opening = background.submit(
            RankStream, ray.train.get_dataset_shard(STREAM), manifests[0].token_dtype
        )
        phases.passed("shard")
        seq_len = max(manifest.seq_len for manifest in manifests)
        divided = divided_model(recipe, vocabulary, seq_len, device, world_size)
        model, passes = divided.model, divided.passes
        optimizer = build_optimizer(recipe.optimizer, model, recipe.workload.blocks(model))
        masks = phase_masks(recipe, divided)
        phases.passed("model")
        stream = opening.result()
        phases.passed("data")
    start = stream.start
    commit = _commit(job, start)
    attempt = _agree(_take_over(job.run, commit, sender) if rank == 0 else None)
    if commit:
        restore(_storage(job, start), commit, model, optimizer)
        if masks:
            masks.restore(commit.step, partial(load, _storage(job, start), commit))
    phases.passed("state")
    held_out = _held_out(job, start, data)
    phases.passed("held_out")
    chooser = automatic(
        recipe,
        job.phases,
        divided.recompute,
        device,
        world_size=world_size,
        per_node=context.get_local_world_size(),
        known=commit.extra.get(CHOSEN, {}) if commit else {},
    )
    keeper = Keeper(
        job.run,
        job.hot,
        attempt=attempt,
        rank=rank,
        config=recipe.checkpoint,
        sender=sender,
        state=lambda: training_state(model, optimizer) | (masks.state() if masks else {}),
        extra=chooser.state,
    )
    started = Started(
        attempt=attempt,
        world_size=world_size,
        step=start.step,
        state=start.tier,
        pids=_pids(world_size),
        seconds=phases.seconds,
    )
    loop = training_loop(
        recipe, divided.clip, vocabulary, device, world_size, counts=data.counts, masks=masks
    )
    with keeper:
        keeper.started(started)
        for line in _all_substitutions(recipe, abilities(device), world_size):
            sender.send(Substituted(text=line))
        if recipe.workers.spares and context.get_local_rank() == 0:
            Spares(context.get_local_world_size(), after=SPARES_AFTER_SECONDS)
        was_over = commit is not None and is_over(
            commit.step, commit.evaluation, steps=recipe.steps_in_all, target=recipe.target
        )
        parts = chooser.cut(stream, keeper.chose)
        steps = loop.run(passes, optimizer, parts, start, keeper.asked)
        for done, act in () if was_over else steps:
            record = replace(done, **chooser.figures())
            keeper.stepped(record)
            is_last = record.step == recipe.steps_in_all
            if due := _due(held_out, record, recipe.evaluation):
                began, rows = time.perf_counter(), chooser.as_chosen(due).micro_batches
                loss = evaluate(
                    passes, recipe.workload, rows, vocabulary, device, counts=data.counts
                )
                metrics = keeper.evaluated(record, loss, time.perf_counter() - began)
                is_last |= _has_reached(recipe.target, metrics, record, keeper)
            keeper.keep(record, act, is_last=is_last)
            if is_last:
                break
            if act >= Act.HALT:
                _rest(keeper.halted(act), recipe.checkpoint.grace_seconds)
        if commit and start.tier == "hot" and was_over:
            keeper.continued(_saving(commit))
    ray.train.report({})


def _has_reached(
    target: TargetConfig | None, metrics: Mapping[str, float], record: StepRecord, keeper: Keeper
) -> bool:
    """Whether the run ends here, at its target: the same on every rank. Collective."""
    if target is None or not _agree(reached(target, metrics)):
        return False
    keeper.reached(record, target.metric, metrics[target.metric])
    return True


def _storage(job: Job, start: Start) -> CommitStorage:
    return job.hot if start.tier == "hot" and job.hot else job.run.sub("checkpoints")


def _commit(job: Job, start: Start) -> Commit | None:
    """The commit that the run continues from; None for a new run."""
    if start.commit is None:
        return None
    return Commit.from_json(_storage(job, start).read(start.commit, MARKER), start.commit)


def _take_over(run: Storage, commit: Commit | None, sender: Sender) -> int:
    """The number of this attempt.

    Lines of the history that died with the worker who had yet to write them are written first.
    """
    storage = run.sub("history")

    def take_over() -> int:
        if commit:
            restore_history(storage, commit)
        saved = max((folder.attempt for folder in folders(run.sub("checkpoints"))), default=0)
        return max(history.next_attempt(storage), saved + 1)

    return patiently(take_over, "the run's history", lambda line: sender.send(Warned(text=line)))


def _saving(commit: Commit) -> Saving:
    return Saving(
        step=commit.step, samples=commit.samples, tokens=commit.tokens, extra=commit.extra
    )


def _rest(request: Request, seconds: float) -> NoReturn:
    """After the state is safe: ends the run, or waits until Ray ends this process.

    Raises:
        Stopped: the run is to end.
        TimeoutError: nobody ended this process.
    """
    if request.act == Act.STOP:
        raise Stopped(request.text)
    Event().wait(seconds)
    raise TimeoutError(f"halted for a {request.reason}, but no other group of workers took over")


def _pids(world_size: int) -> dict[int, tuple[str, int]]:
    """Node and process of every rank."""
    here = (ray.get_runtime_context().get_node_id(), os.getpid())
    return dict(enumerate(_of_all_ranks(here, world_size)))


def _all_substitutions(recipe: Recipe, here: Abilities, world_size: int) -> list[str]:
    """What any rank uses instead of what the recipe asks for: each line once."""
    own = missing_here(recipe, here)
    return list(dict.fromkeys(line for lines in _of_all_ranks(own, world_size) for line in lines))


def _of_all_ranks(value: Any, world_size: int) -> list[Any]:
    """Every rank's value, by rank."""
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, value)
    return found


def _fair_threads(local_world_size: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def _agree(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    agreed = [value]
    dist.broadcast_object_list(agreed, src=0)
    return agreed[0]


def _held_out(job: Job, start: Start, data: DataRank) -> dict[int, RankStep | None]:
    """This rank's held-out data in every phase that is left, by the phase's last step."""
    samples, rank, num_ranks = job.recipe.evaluation.samples, data.rank, data.dp_size
    return {
        phase.last_step: held_out_step(batches, samples=samples, rank=rank, num_ranks=num_ranks)
        if batches
        else None
        for phase, batches in zip(job.phases, job.held_out, strict=True)
        if phase.last_step > start.step
    }


def _due(
    held_out: Mapping[int, RankStep | None], record: StepRecord, config: EvaluationConfig
) -> RankStep | None:
    """What the model is evaluated on after that step; there is always an evaluation at the end of a
    phase."""
    last = min(last for last in held_out if last >= record.step)
    is_due = evaluation_due(
        config,
        step=record.step,
        steps=last,
        samples=record.samples,
        batch_samples=record.batch_samples,
    )
    return held_out[last] if is_due else None
