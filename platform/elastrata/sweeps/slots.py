"""The slots of a sweep: how many trials run at a time, and what each may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from elastrata.recipe.recipe import WorkersConfig
from elastrata_pipelines.errors import UserError

_CPUS_OF_A_GROUP = 0.001
"""The claim of the process beside a group of workers, as Tune wants one from it; the workers
have their own."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Equal shares of a cluster."""

    count: int
    """Trials at a time."""
    cpus: float
    """Logical CPUs that the process of a trial claims."""
    gpus: float
    threads: int
    """CPU threads of a worker."""


def slots(
    workers: WorkersConfig,
    resources: Mapping[str, float],
    wanted: int | Literal["auto"],
    *,
    trials: int,
) -> Slots:
    """Shares out a cluster so that trials do not fight over it.

    Args:
        workers: of a trial.
        resources: of the cluster, by Ray's names.
        wanted: trials at a time.
        trials: there are no more.

    Raises:
        UserError: the cluster is too small for a single one, or for as many groups as are wanted.
    """
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    gpus_each = workers.gpus_each(gpus)
    of_one = {"CPU": workers.most * workers.cpus, "GPU": workers.most * gpus_each}
    if workers.most == 1 and not gpus_each:
        of_one["CPU"] = min(1.0, cpus)
    claimed = {**of_one, "CPU": of_one["CPU"] + _CPUS_OF_A_GROUP * (workers.most > 1)}
    fitting = min(
        (int(resources.get(kind, 0.0) / each + 1e-9) for kind, each in claimed.items() if each),
        default=0,
    )
    if fitting < 1:
        needs = " and ".join(f"{amount:g} {kind}s" for kind, amount in of_one.items() if amount)
        raise UserError(
            f"workers.max: {workers.most}: a trial needs {needs}, the cluster has {cpus:g} CPUs "
            f"and {gpus:g} GPUs"
        )
    if workers.most > 1 and wanted != "auto" and min(trials, wanted) > fitting:
        raise UserError(
            f"concurrency: {wanted}: the cluster has room for {fitting} trials of {workers.most} "
            "workers at a time"
        )
    if not gpus_each and wanted == "auto":
        fitting = max(1, min(fitting, int(cpus / workers.most)))  # a CPU for every worker
    count = min(trials, fitting if wanted == "auto" else wanted)
    share = cpus / count
    threads = max(1, int(share / workers.most))
    if workers.most > 1:
        return Slots(count=count, cpus=_CPUS_OF_A_GROUP, gpus=0.0, threads=threads)
    return Slots(
        count=count,
        cpus=min(share, of_one["CPU"]) if gpus_each else share,
        gpus=min(gpus_each, gpus / count),
        threads=threads,
    )
