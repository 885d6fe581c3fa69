"""A rehearsal's session: fake tensors, fake CUDA, and the process groups of all ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import combinations
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # noqa: F401  before functions of torch are replaced: it has a table of them
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _sharding_prop
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastrata.parallel import parallelize
from elastrata.rehearsal.cuda import FakeDevice, fake_cuda
from elastrata.rehearsal.ledger import Ledger
from elastrata.rehearsal.recorder import Recorder
from elastrata.step.prefetch import SynchronousBackground
from elastrata.trainer import trainer

_MESH_METHODS = (
    "__init__",
    "__getitem__",
    "_flatten",
    "_unflatten",
    "_compute_coordinate_on_dim",
    "get_all_groups",
    "get_coordinate",
    "get_group",
    "get_local_rank",
)
"""Methods that compute with rank numbers, which must not be fake tensors. Some do not exist in
every version of torch."""
_ALONE = "alone"
WORLD = "world"


class Axes:
    """Names of process groups, by the meshes created so far."""

    def __init__(self) -> None:
        self._names: dict[frozenset[int], str] = {}

    def add(self, mesh: DeviceMesh) -> None:
        """Name the groups of every combination of a mesh's axes to which this rank belongs."""
        names, place, ranks = mesh.mesh_dim_names, mesh.get_coordinate(), mesh.mesh
        if names is None or place is None:
            return
        for size in range(1, len(names) + 1):
            for axes in combinations(range(len(names)), size):
                index = [slice(None) if n in axes else place[n] for n in range(len(names))]
                members = frozenset(ranks[tuple(index)].flatten().tolist())
                is_whole = size > 1 and len(members) == dist.get_world_size()
                name = WORLD if is_whole else "+".join(names[n] for n in axes)
                self._names.setdefault(members, name)

    def __call__(self, group: dist.ProcessGroup) -> tuple[str, int]:
        """Return the axis of a group, and its number of ranks."""
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return _ALONE, 1
        name = self._names.get(frozenset(ranks))
        return name or (WORLD if len(ranks) == dist.get_world_size() else "other"), len(ranks)


@contextmanager
def fake_ranks(ledger: Ledger, world_size: int | None, rank: int) -> Iterator[Axes]:
    """Create process groups of `world_size` ranks, of which only this one exists.

    Collectives return at once and leave their tensors unchanged. Objects gathered from other ranks
    are copies of this rank's.
    """
    axes = Axes()
    with ExitStack() as patches:
        for original, replacement in _replacements(ledger).items():
            _replace_everywhere(patches, original, replacement)
        for name, method in _mesh_methods(axes).items():
            patches.enter_context(patch.object(DeviceMesh, name, method))
        # Sharding propagation tries operators on tensors of the whole shape. In the active mode,
        # these would count as memory.
        patches.enter_context(patch.object(_sharding_prop, "detect_fake_mode", lambda: None))
        if world_size is not None:
            dist.init_process_group(
                "fake",
                store=FakeStore(),
                rank=rank,
                world_size=world_size,
            )
        try:
            yield axes
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _replacements(ledger: Ledger) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    init, new_group = dist.init_process_group, dist.new_group

    def fake_init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        init("fake", *args, **kwargs)

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        ranks = args[0] if args else kwargs.get("ranks")
        backend = kwargs.pop("backend", None)
        ledger.groups[backend or "default", len(ranks) if ranks else dist.get_world_size()] += 1
        return new_group(*args, **kwargs)

    def all_gather_object(into: list[Any], value: Any, group: Any = None) -> None:
        into[:] = [value] * len(into)

    def gather_object(value: Any, into: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if into is not None:
            into[:] = [value] * len(into)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    return {
        dist.init_process_group: fake_init,
        dist.new_group: fake_group,
        dist.all_gather_object: all_gather_object,
        dist.gather_object: gather_object,
        # Rank 0's objects are taken as equal to this rank's.
        dist.broadcast_object_list: nothing,
        dist.monitored_barrier: nothing,
        device_mesh.init_device_mesh: _with_real_tensors(device_mesh.init_device_mesh),
    }


def _mesh_methods(axes: Axes) -> Mapping[str, Any]:
    methods: dict[str, Any] = {}
    for name, method in vars(DeviceMesh).items():
        if isinstance(method, staticmethod):
            methods[name] = staticmethod(_with_real_tensors(method.__func__))
        elif name in _MESH_METHODS:
            methods[name] = _with_real_tensors(method)
    make = methods["__init__"]

    @wraps(make)
    def make_and_name(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        make(mesh, *args, **kwargs)
        with unset_fake_temporarily():
            axes.add(mesh)

    return {**methods, "__init__": make_and_name}


def _with_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs with real tensors."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def _replace_everywhere(
    patches: ExitStack, original: Callable[..., Any], replacement: Callable[..., Any]
) -> None:
    """Replace a function in every module that imported it under its name."""
    name = original.__name__
    for module in [m for m in sys.modules.values() if vars(m).get(name) is original]:
        patches.enter_context(patch.object(module, name, replacement))


DEVICE = FakeDevice()


@contextmanager
def rehearsal(
    device: FakeDevice = DEVICE, *, world_size: int | None = 1, rank: int = 0
) -> Iterator[Ledger]:
    """Give tensors shapes without values, in all threads started in the block, and provide
    `torch.device("cuda")`.

    `load_shim` must be called before torch is imported.

    Args:
        device: the device of every rank.
        world_size: ranks of the default process group; None: there is no default group.
        rank: rank of this process.

    Yields:
        The ledger of this rank.
    """
    ledger = Ledger()
    with fake_cuda(device, ledger), fake_ranks(ledger, world_size, rank) as axes, ExitStack() as on:
        # Meshes and constants are real tensors.
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        recorder = Recorder(fake, ledger, axes)
        modes = fake, recorder
        on.enter_context(patch.object(threading.Thread, "run", _run_with(modes)))
        on.enter_context(patch.object(parallelize, "nodes_of_all", _nodes_of(device)))
        on.enter_context(patch.object(torch.UntypedStorage, "resize_", _resize(ledger)))
        on.enter_context(patch.object(FakeTensor, "tolist", _tolist(recorder)))
        # PyTorch's allocator does not know fake streams.
        on.enter_context(patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
        # Threads take turns in a fake mode, which torch's fake mode does not support.
        on.enter_context(
            patch.object(trainer, "BackgroundThread", lambda _: SynchronousBackground())
        )
        for mode in modes:
            on.enter_context(mode)
        yield ledger


def _nodes_of(device: FakeDevice) -> Callable[[], list[object]]:
    """Return a replacement of `nodes_of_all` for ranks on full nodes, in order."""
    return lambda: [rank // device.per_node for rank in range(dist.get_world_size())]


def _run_with(modes: tuple[Any, ...]) -> Callable[[threading.Thread], None]:
    """Return a replacement of `Thread.run` that enters these modes first."""
    # A new thread does not inherit the modes of the thread that starts it.
    run = threading.Thread.run

    def run_with(thread: threading.Thread) -> None:
        with ExitStack() as on:
            for mode in modes:
                on.enter_context(mode)
            run(thread)

    return run_with


def _resize(ledger: Ledger) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
    """Return a replacement of `UntypedStorage.resize_`, by which FSDP2 frees and allocates
    memory."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resized: torch.UntypedStorage = resize(storage, size)
        ledger.resized(storage)
        return resized

    return resize_


def _tolist(recorder: Recorder) -> Callable[[FakeTensor], Any]:
    """Return a replacement of `Tensor.tolist` that reads the device once for all values."""
    # The original reads value by value: that would count as many waits.
    by_number: Any = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        if tensor.is_cuda or tensor.constant is None:
            return recorder.tolist(tensor)
        return by_number(tensor)

    return tolist
