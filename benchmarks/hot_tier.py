"""In-memory checkpoints: their cost to the training, time to completion, and loading.

    python benchmarks/hot_tier.py

Two ranks (gloo), Ray actors on this machine, train with steps of at least 100 ms, which consist of
matrix products and a reduction. In every round they save one sharded state and continue training
until the copy is complete. A save costs its stall (the loop waits) and its drag (steps during the
save take longer). With a rank on every core, as here, the drag is at its worst. `processor_s` is
the CPU time of a save in the rank's process, which is independent of the load of the machine. The
figures are medians over the rounds, for a state of about 200 MB, a small one with as many tensors
as BERT base, and a tiny one; each also with `DurableSaver` on the local disk. Writes
`results/hot_tier.json`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from harness import medians, parser_of, write_result
from torch import nn
from torch.distributed.fsdp import fully_shard

from elastrata.checkpoints.commit import CommitStorage, list_commits
from elastrata.checkpoints.replicas.replicas import (
    close_replicas,
    find_newest_replica,
    open_replicas,
)
from elastrata.checkpoints.save import DurableSaver, replica_saver
from elastrata.checkpoints.state import restore, training_state
from elastrata.driver.ray_session import ray_session
from elastrata_pipelines.storage import Storage

WORLD_SIZE = 2
STATES = {"large": (1024, 16), "many": (32, 100), "tiny": (32, 8)}
"""Width and number of the linear layers."""
STEP_SECONDS = 0.1
MATRIX = 384
LIMIT_BYTES = 4 * 2**30
SHARE = 0.02
"""Share of the training time that copies may cost."""


class Rank:
    """One rank of a training that consists of matrix products."""

    def __init__(self, rank: int, world_size: int, rendezvous: str, shape: tuple[int, int]) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        width, blocks = shape
        self._model = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))
        for block in self._model:
            fully_shard(block)
        fully_shard(self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        # A step of AdamW creates the optimizer state that is saved.
        self._model(torch.ones(1, width)).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._matrix = torch.ones(MATRIX, MATRIX)
        self._products = 0

    def calibrate(self) -> None:
        """Measure the number of products per step; all ranks use the same number."""
        # CPU time, so that other processes do not shorten the steps.
        processor, num_products = time.thread_time(), 0
        while time.thread_time() - processor < 10 * STEP_SECONDS:
            self._matrix @ self._matrix
            num_products += 1
        products = torch.tensor(num_products / 10)
        dist.all_reduce(products, dist.ReduceOp.MAX)
        # 10% more, so that no step is shorter than `STEP_SECONDS`.
        self._products = round(products.item() * 1.1)

    def step(self) -> float:
        started = time.perf_counter()
        for _ in range(self._products):
            self._matrix @ self._matrix
        dist.all_reduce(torch.ones(1))
        return time.perf_counter() - started

    def measure(self, storage: CommitStorage, kind: str, rounds: int) -> list[dict[str, float]]:
        """Save `rounds` times after a warm-up save; return the seconds of each save."""
        saver = (
            replica_saver(storage, attempt=1, warn=print)
            if kind == "hot"
            else DurableSaver(storage, keep_last=1, keep_best=False, warn=print)
        )
        processor, count = time.process_time(), 20
        idle = statistics.median(self.step() for _ in range(count))
        of_step = (time.process_time() - processor) / count
        measured_rounds = [self._round(saver, step, idle, of_step) for step in range(rounds + 1)]
        saver.close()
        return measured_rounds[1:]

    def _round(
        self, saver: DurableSaver, step: int, idle: float, of_step: float
    ) -> dict[str, float]:
        dist.barrier()
        processor = time.process_time()
        agree_time = time.perf_counter()
        assert saver.all_idle()
        start_time = time.perf_counter()
        state = training_state(self._model, self._optimizer)
        state_time = time.perf_counter()
        saver.save(state, step=step, samples=step, tokens=step)
        stall_time = time.perf_counter()
        steps_during_save = [self.step()]
        # A collective: all ranks take the same number of steps.
        while not saver.all_idle():
            steps_during_save.append(self.step())
        complete_time = time.perf_counter()
        # The process's CPU time minus that of its steps is the cost of the save, its threads
        # included.
        processor = time.process_time() - processor - of_step * len(steps_during_save)
        return {
            "step_s": idle,
            "agree_s": start_time - agree_time,
            "state_s": state_time - start_time,
            "stall_s": stall_time - agree_time,
            # Noise can make the differences negative.
            "drag_s": max(0.0, sum(steps_during_save) - idle * len(steps_during_save)),
            "processor_s": max(0.0, processor),
            "complete_s": complete_time - start_time,
        }

    def load(self, storage: CommitStorage) -> float:
        (commit,) = list_commits(storage)
        dist.barrier()
        started = time.perf_counter()
        restore(storage, commit, self._model, self._optimizer)
        return time.perf_counter() - started


def start(world_size: int, folder: str, shape: tuple[int, int]) -> list[Any]:
    rendezvous = str(Path(folder) / f"rendezvous{time.monotonic_ns()}")
    # No CPUs are reserved, so that three ranks can start on two cores.
    actor: Any = ray.remote(num_cpus=0)(Rank)
    return [actor.remote(rank, world_size, rendezvous, shape) for rank in range(world_size)]


def on_all(ranks: list[Any], method: str, *args: Any) -> list[Any]:
    return list(ray.get([getattr(rank, method).remote(*args) for rank in ranks]))


def end(ranks: list[Any]) -> None:
    for rank in ranks:
        ray.kill(rank)


def summary(by_rank: list[list[dict[str, float]]]) -> dict[str, float]:
    """Return medians over the rounds of the slowest rank's figures."""
    rounds = [
        {name: max(rank[name] for rank in ranks) for name in ranks[0]}
        for ranks in zip(*by_rank, strict=True)
    ]
    median = medians(rounds)
    cost = median["stall_s"] + median["drag_s"]
    return {
        **{name: round(value, 4) for name, value in median.items()},
        "cost_s": round(cost, 4),
        "steps_apart_for_2_percent": max(1, -int(-cost // (SHARE * median["step_s"]))),
        "steps_apart_for_2_percent_of_stall": max(
            1, -int(-median["stall_s"] // (SHARE * median["step_s"]))
        ),
    }


def measure_state(shape: tuple[int, int], rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        disk = Storage(str(Path(folder) / "checkpoints"))
        hot = open_replicas(LIMIT_BYTES)
        ranks = start(WORLD_SIZE, folder, shape)
        on_all(ranks, "calibrate")
        figures: dict[str, Any] = {
            "hot": summary(on_all(ranks, "measure", hot, "hot", rounds)),
            "durable": summary(on_all(ranks, "measure", disk, "durable", rounds)),
        }
        end(ranks)
        looking = time.perf_counter()
        commit = find_newest_replica(hot)
        figures["hot"]["found_s"] = round(time.perf_counter() - looking, 4)
        assert commit is not None
        figures["state_mb"] = round(sum(file.size for file in commit.files.values()) / 1e6, 2)
        # Smaller and larger groups than the one that saved must load the state, too.
        for world_size in (1, 2, 3):
            ranks = start(world_size, folder, shape)
            figures["hot"][f"loaded_at_{world_size}_s"] = round(max(on_all(ranks, "load", hot)), 4)
            end(ranks)
        close_replicas(hot)
    return figures


def main() -> None:
    rounds = parser_of(__doc__, rounds=9).parse_args().rounds
    # Actors import this script's modules.
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    with ray_session("local", num_cpus=WORLD_SIZE):
        figures = {name: measure_state(shape, rounds) for name, shape in STATES.items()}
    write_result("hot_tier", {"rounds": rounds, "states": figures}, ("ray", "torch"))


if __name__ == "__main__":
    main()
