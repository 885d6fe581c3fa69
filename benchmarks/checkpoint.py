"""The cost of a checkpoint: stall of the training loop, MB/s written, verified and loaded.

    python benchmarks/checkpoint.py

Two ranks (gloo) save one sharded state of about 200 MB to the local disk. Each round saves it once
with `DurableSaver`, while the ranks compute matrix products in place of training steps, and once
with DCP's synchronous `save`. The figures are medians over the rounds. Writes
`results/checkpoint.json`.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import medians, on_ranks, parser_of, write_result
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as synchronous_save
from torch.distributed.fsdp import fully_shard

from elastrata.checkpoints.commit import file_problems, list_commits
from elastrata.checkpoints.save import DurableSaver
from elastrata.checkpoints.state import restore, training_state
from elastrata_pipelines.storage import Storage

WORLD_SIZE = 2
# 17 million parameters: with AdamW's two moments about 200 MB.
WIDTH, BLOCKS = 1024, 16
# Small matrices, so that the end of a save is noticed early.
WORK = 256


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    for block in model:
        # As the engine shards: every block, then the rest of the model.
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    # A step of AdamW creates the optimizer state that is saved.
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def products_per_second(saver: DurableSaver | None, seconds: float) -> float:
    """Return the matrix products per second, during the current save or for some seconds."""
    matrix = torch.ones(WORK, WORK)
    started, num_products = time.perf_counter(), 0
    while saver.saving if saver else time.perf_counter() - started < seconds:
        matrix @ matrix
        num_products += 1
    return num_products / (time.perf_counter() - started)


def one_round(
    storage: Storage, saver: DurableSaver, step: int, state: dict[str, Any]
) -> dict[str, float]:
    dist.barrier()
    # Measured in every round, as the load of the machine changes.
    idle = products_per_second(None, 1.0)
    dist.barrier()
    started = time.perf_counter()
    stall = saver.save(state, step=step, samples=step, tokens=step)
    busy = products_per_second(saver, 0.0)
    written = time.perf_counter() - started
    with tempfile.TemporaryDirectory(dir=storage.path()) as folder:
        folders: list[Any] = [folder]
        # All ranks must save to the same folder.
        dist.broadcast_object_list(folders, src=0)
        dist.barrier()
        started = time.perf_counter()
        synchronous_save(state, storage_writer=FileSystemWriter(f"{folders[0]}/it"))
        synchronous = time.perf_counter() - started
        dist.barrier()
    return {
        "stall_async_s": stall,
        "stall_synchronous_s": synchronous,
        "written_after_s": written,
        "compute_during_save": busy / idle,
    }


def measure(rank: int, folder: str, rounds: int) -> dict[str, Any]:
    """Return this rank's rounds, with the first one separate, and the seconds of loading."""
    warnings.simplefilter("ignore")
    storage = Storage(f"{folder}/checkpoints")
    Path(storage.path()).mkdir(exist_ok=True)
    model, optimizer = training()
    saver = DurableSaver(storage, keep_last=1, keep_best=False, warn=print)
    state = training_state(model, optimizer)
    measured_rounds = [one_round(storage, saver, step, state) for step in range(rounds + 1)]
    saver.close()
    (commit,) = list_commits(storage)
    dist.barrier()
    started = time.perf_counter()
    restore(storage, commit, model, optimizer)
    seconds_to_load = time.perf_counter() - started
    # The first save stalls for longer (17 ms instead of 11 ms), so it is reported separately.
    return {
        "first": measured_rounds[0],
        "rounds": measured_rounds[1:],
        "loaded_after_s": seconds_to_load,
    }


def summary(folder: str, result: dict[str, Any]) -> dict[str, float]:
    storage = Storage(f"{folder}/checkpoints")
    (commit,) = list_commits(storage)
    megabytes = sum(record.size for record in commit.files.values()) / 1e6
    started = time.perf_counter()
    # Verifies the checksums of all files.
    assert not file_problems(storage, commit)
    verified = time.perf_counter() - started
    median = medians(result["rounds"])
    return {
        "state_mb": megabytes,
        "stall_async_s": median["stall_async_s"],
        "stall_async_first_s": result["first"]["stall_async_s"],
        "stall_synchronous_s": median["stall_synchronous_s"],
        "stall_async_over_synchronous": median["stall_async_s"] / median["stall_synchronous_s"],
        "written_mb_per_s": megabytes / median["written_after_s"],
        "compute_during_save_over_idle": median["compute_during_save"],
        "verified_mb_per_s": megabytes / verified,
        "loaded_mb_per_s": megabytes / result["loaded_after_s"],
    }


def main() -> None:
    rounds = parser_of(__doc__, rounds=7).parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        result, _ = on_ranks(WORLD_SIZE, measure, folder, rounds)
        figures = summary(folder, result)
    rounded = {name: round(value, 4) for name, value in figures.items()}
    write_result("checkpoint", {"rounds": rounds, "figures": rounded}, ("torch",))


if __name__ == "__main__":
    main()
