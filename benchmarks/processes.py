"""Processes that benchmarks start: for a case, for ranks, for a command, in another environment."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function in a new process, whose memory and compiled code are its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def on_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, backend: str = "gloo"
) -> list[Any]:
    """The results of `function(rank, *args)` on each of some new ranks of one process group, of one
    thread each; with NCCL each has its GPU."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        group = (ranks, backend, Path(folder))
        torch.multiprocessing.spawn(_on_rank, (*group, function, args), nprocs=ranks)
        return [torch.load(Path(folder, f"{n}"), weights_only=False) for n in range(ranks)]


def _on_rank(
    rank: int,
    ranks: int,
    backend: str,
    folder: Path,
    function: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    where = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=ranks)
    torch.save(function(rank, *args), folder / str(rank))
    dist.barrier()
    dist.destroy_process_group()


def last_line(command: Sequence[str | Path], **environment: str) -> Any:
    """The JSON value that a command prints as its last line.

    Raises:
        RuntimeError: it failed; with the end of what it wrote to stderr.
    """
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, encoding="utf-8"
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stderr[-4000:]}")
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else None


def elastrata(*arguments: str) -> dict[str, Any]:
    """The result of a command of `elastrata`; what it shows people goes to stderr."""
    done = subprocess.run(
        ["elastrata", *arguments, "--json"], check=True, stdout=subprocess.PIPE, encoding="utf-8"
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def trained_steps(recipe: str, *overrides: str) -> list[Any]:
    """The steps of a run by `elastrata train`, whose folder goes away again."""
    from elastrata.run import history
    from elastrata_pipelines.storage import Storage

    with tempfile.TemporaryDirectory() as storage:
        elastrata("train", recipe, f"storage={storage}", *overrides, "--name", "run")
        return list(history.effective_steps(history.read(Storage(storage).sub("run", "history"))))


def versions_in(python: Path, packages: Sequence[str]) -> Mapping[str, str]:
    """The versions of packages in another environment, by the path of its Python."""
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    versions: Mapping[str, str] = last_line([python, "-c", code, *packages])
    return versions
