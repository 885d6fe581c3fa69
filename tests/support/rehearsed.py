"""Functions that tests call on fake CUDA."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from elastrata.rehearsal.ledger import Ledger
from elastrata.rehearsal.process import Request
from elastrata.step.compute_time import build_compute_time
from elastrata_pipelines.errors import UserError

CUDA = torch.device("cuda", 0)


def mistakes(recipe: str, overrides: list[str], cluster: str) -> tuple[str, ...]:
    """A line for each that a rehearsal refuses."""
    from elastrata.rehearsal.rehearse import read_task

    asked = Request(recipe=recipe, overrides=tuple(overrides), cluster=cluster)
    with pytest.raises(UserError) as refused:
        read_task(asked)
    return refused.value.problems


def waits_of_a_few_lines(ledger: Ledger) -> list[tuple[str, str, int]]:
    """Of lines that wait for the device, and of some that do not."""
    values = torch.ones(4, device=CUDA, requires_grad=True)
    (values * 2).sum().backward()
    assert values.grad is not None
    values.grad.sum().item()
    values.detach().tolist()
    values.detach().cpu()
    torch.ones(4).to(CUDA)
    torch.ones(4).pin_memory().to(CUDA, non_blocking=True)
    torch.empty(4, pin_memory=True).copy_(values.detach(), non_blocking=True)
    values[values > 0].sum()
    torch.cuda.synchronize()
    torch.cuda.Event().synchronize()
    waits = ledger.take().waits
    return [(wait.reason, wait.function, wait.count) for wait in waits]


def memory_in_use(ledger: Ledger) -> list[int]:
    """Before and after a tensor was freed; with a storage that is resized."""
    kept = torch.ones(1024, device=CUDA)
    freed = torch.ones(1024, device=CUDA)
    found = [torch.cuda.memory_allocated()]
    del freed
    found += [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
    torch.cuda.reset_peak_memory_stats()
    found.append(torch.cuda.max_memory_allocated())
    kept.untyped_storage().resize_(0)
    found.append(torch.cuda.memory_allocated())
    return found


def messages_on_a_mesh(ledger: Ledger) -> dict[str, Any]:
    """One for each axis, and what objects and groups come to."""
    mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("replicate", "shard"))
    values = torch.ones(8, device=CUDA, dtype=torch.bfloat16)
    dist.all_reduce(values, group=mesh.get_group("replicate"))
    dist.reduce_scatter_tensor(values.new_empty(4), values, group=mesh.get_group("shard"))
    dist.all_reduce(values)
    objects: list[Any] = [None] * 8
    dist.all_gather_object(objects, "mine")
    dist.new_group(backend="gloo")
    messages = [
        (one.kind, one.axis, one.ranks, one.dtype, one.count, one.bytes)
        for one in ledger.take().messages
    ]
    return {"messages": messages, "objects": objects, "gloo groups": ledger.groups["gloo", 8]}


def numbers_that_are_read(ledger: Ledger) -> list[Any]:
    """Of tensors that came from the host, unchanged or not, and of one that the device made."""
    told = torch.tensor([3.0, 4.0], device=CUDA)
    dist.all_reduce(told)
    unchanged = told.tolist()
    return [unchanged, told.mul_(2).tolist(), told.sum().item(), torch.tensor(5).item()]


def own_time_of_steps(ledger: Ledger) -> tuple[list[tuple[float, float]], int]:
    """What a rank on a GPU tells of three steps with 1, 2 and 3 micro-batches and of 10, 20 and 30
    units of work, in seconds and work, where a second passes from event to event; and how often the
    host waited for the device."""
    clock = count()

    class Ticking(torch.cuda.Event):  # type: ignore[misc,valid-type]
        def record(self, stream: Any = None) -> Any:
            self.at = next(clock)
            return self

        def elapsed_time(self, end: Any) -> float:
            return 1000.0 * (end.at - self.at)

    torch.cuda.Event = Ticking  # type: ignore[misc]
    blocks = [nn.Linear(2, 2, device=CUDA) for _ in range(2)]
    rows = torch.ones(1, 2, device=CUDA)
    ledger.take()
    own, told = build_compute_time(CUDA, blocks), []
    for step in (1, 2, 3):
        own.begin()
        for _ in range(step):
            blocks[1](blocks[0](rows))
        with torch.no_grad():
            blocks[0](rows)
        effort = own.effort(10.0 * step)
        told.append((effort.seconds, effort.work))
    own.close()
    return told, sum(wait.count for wait in ledger.take().waits)
