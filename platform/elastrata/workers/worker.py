"""The worker: what every member of the group does, from the first import to the last checkpoint."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, NoReturn

import ray.train
import torch
import torch.distributed as dist
from torch import nn

from elastrata.checkpoints.commit import MARKER, Commit, folders
from elastrata.checkpoints.commit_storage import CommitStorage
from elastrata.checkpoints.training_state import restore, training_state
from elastrata.recipe.recipe import Recipe
from elastrata.runs import history
from elastrata.runs.unwritten import restore_history
from elastrata.training.clip import Clip, build_clip
from elastrata.training.device import current_device
from elastrata.training.ends import Stopped
from elastrata.training.evaluate import evaluate, held_out_rows
from elastrata.training.loop import Loop
from elastrata.training.optimizer import build_optimizer
from elastrata.training.parallel import data_mesh, parallelize
from elastrata.training.phases import Phases
from elastrata.training.request import Act, Request
from elastrata.workers.backoff import patiently
from elastrata.workers.events import Refused, Started, Warned
from elastrata.workers.job import Job
from elastrata.workers.keeper import Keeper, Saving, due
from elastrata.workers.mailbox import Sender
from elastrata.workers.warm import Spares
from elastrata_pipelines.batches import Start
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.rows import Rows
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
    """Continues from the newest state to the last step."""
    phases, context = Phases(), ray.train.get_context()
    recipe, manifest = job.recipe, job.batches.manifest
    rank, world_size = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(recipe.workers.threads or _fair_threads(context.get_local_world_size()))
    device = current_device()
    with ThreadPoolExecutor(1) as background:
        opening = background.submit(
            RankStream, ray.train.get_dataset_shard(STREAM), manifest.token_dtype
        )
        phases.passed("shard")
        model = _build_model(recipe, manifest, device, world_size)
        optimizer = build_optimizer(recipe.optimizer, model, recipe.workload.blocks(model))
        phases.passed("model")
        stream = opening.result()
        phases.passed("data")
    start = stream.start
    commit = _commit(job, start)
    attempt = _agree(_take_over(job.run, commit, sender) if rank == 0 else None)
    if commit:
        restore(_storage(job, start), commit, model, optimizer)
    phases.passed("state")
    held_out = _held_out(job, rank, world_size)
    phases.passed("held_out")
    keeper = Keeper(
        job.run,
        job.hot,
        attempt=attempt,
        rank=rank,
        config=recipe.checkpoint,
        steps=recipe.steps,
        sender=sender,
        state=lambda: training_state(model, optimizer),
    )
    started = Started(
        attempt=attempt,
        world_size=world_size,
        step=start.step,
        state=start.tier,
        pids=_pids(rank, world_size),
        seconds=phases.seconds,
    )
    loop = _loop(
        recipe,
        build_clip(recipe.clip, model, ordered=recipe.parallel.virtual_ranks is not None),
        manifest.vocabulary,
        device,
        world_size,
    )
    with keeper:
        keeper.started(started)
        if recipe.workers.spares and context.get_local_rank() == 0:
            Spares(context.get_local_world_size(), after=SPARES_AFTER_SECONDS)
        for record, act in loop.run(model, optimizer, stream, start, keeper.asked):
            keeper.stepped(record)
            if held_out and due(record.step, recipe.evaluation.every, recipe.steps):
                began = time.perf_counter()
                loss = evaluate(model, recipe.workload, held_out, manifest.vocabulary, device)
                keeper.evaluated(record, loss, time.perf_counter() - began)
            keeper.keep(record, act)
            if act >= Act.HALT and record.step < recipe.steps:
                _rest(keeper.halted(act), recipe.checkpoint.grace_seconds)
        if commit and start.tier == "hot" and start.step == recipe.steps:
            keeper.continued(_saving(commit))
    ray.train.report({"step": recipe.steps})


def _loop(
    recipe: Recipe, clip: Clip, vocabulary: Vocabulary, device: torch.device, world_size: int
) -> Loop:
    return Loop(
        workload=recipe.workload,
        vocabulary=vocabulary,
        seed=recipe.seed,
        peak_lr=recipe.optimizer.lr,
        schedule=recipe.schedule,
        steps=recipe.steps,
        clip=clip,
        on_nonfinite=recipe.on_nonfinite,
        device=device,
        world_size=world_size,
    )


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


def _pids(rank: int, world_size: int) -> dict[int, tuple[str, int]]:
    """Node and process of every rank."""
    here = (rank, (ray.get_runtime_context().get_node_id(), os.getpid()))
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, here)
    return dict(found)


def _fair_threads(local_world_size: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def _agree(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    agreed = [value]
    dist.broadcast_object_list(agreed, src=0)
    return agreed[0]


def _build_model(
    recipe: Recipe, manifest: Manifest, device: torch.device, world_size: int
) -> nn.Module:
    torch.manual_seed(recipe.seed)
    with device:
        model = recipe.workload.build_model(manifest.vocabulary, manifest.seq_len)
    return parallelize(
        model,
        recipe.workload.blocks(model),
        data_mesh(device.type, world_size, recipe.parallel.replicate),
        precision=recipe.precision,
        activation_checkpointing=recipe.activation_checkpointing,
        compile=recipe.compile,
        parallel=recipe.parallel,
    )


def _held_out(job: Job, rank: int, world_size: int) -> list[Rows]:
    if job.held_out is None:
        return []
    samples = job.recipe.evaluation.samples
    return held_out_rows(job.held_out, samples=samples, rank=rank, num_ranks=world_size)
