"""Staging: copies of a state in main memory, taken while training continues.

PyTorch's `torch.distributed.checkpoint.staging.DefaultStager` makes one copy per tensor, on a
stream that does not wait for earlier updates, and blocks the host before the next update. Here
tensors are copied together in a few copies, and streams wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from typing_extensions import override

from elastrata.parallel.sharding import local, shard_like

BUCKET_BYTES = 2**27
"""Tensors are gathered on the GPU up to this size, then copied at once. A power of two, because
pinned memory is allocated in powers of two."""


class Stager:
    """Copies of states in reused main memory, for all savers of a state. Savers of the same step
    share one copy.

    From a GPU the copies go to pinned memory on a separate stream, and the host waits for none of
    them: `before_change` must be called before anything changes the tensors.
    """

    def __init__(self) -> None:
        # Kept for reuse: allocating and pinning fresh pages would cost more than the copy.
        self._copies: list[StagedCopy] = []
        self._stream: torch.cuda.Stream | None = None
        self._newest: torch.cuda.Event | None = None

    def stage(self, state: dict[str, Any], step: int) -> StagedCopy:
        """Return a copy of a state as it is now; the caller releases it.

        Args:
            state: nested dicts of tensors and plain values.
            step: number of the step. A copy of the same step that is still in use is returned
                again.
        """
        if same := next((copy for copy in self._copies if copy.shared(step)), None):
            return same
        copy = next((copy for copy in self._copies if copy.is_free), None) or self._new()
        copy.taken(step)
        try:
            self._fill(copy, state)
        except BaseException:
            copy.release()
            raise
        return copy

    def before_change(self) -> None:
        """Order later work of the current stream after the copies in progress."""
        if self._newest is not None:
            torch.cuda.current_stream().wait_event(self._newest)
            self._newest = None

    def _new(self) -> StagedCopy:
        self._copies.append(StagedCopy())
        return self._copies[-1]

    @torch.no_grad()
    def _fill(self, copy: StagedCopy, state: dict[str, Any]) -> None:
        if not any(tensor.device.type == "cuda" for tensor in _tensors(state)):
            copy.state = _copy_to_host(state, copy.state)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # The update of this step may still be running.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copy.fill_from_gpu(state)
            copy.arrival_event.record()
        self._newest = copy.arrival_event


class StagedCopy:
    """A state in main memory, shared by one or more savers, which release it from their threads."""

    def __init__(self) -> None:
        self.state: Any = None
        self._step, self._users, self._lock = -1, 0, Lock()
        self._buckets: list[Bucket] = []
        self._layout: list[tuple[Any, ...]] = []
        self._arrived: torch.cuda.Event | None = None

    @property
    def arrival_event(self) -> torch.cuda.Event:
        """Event after the last copy. Waiting for it does not occupy a CPU core."""
        if self._arrived is None:
            event: Callable[..., torch.cuda.Event] = torch.cuda.Event
            # A blocking event lets the waiting thread sleep; by default it may spin.
            self._arrived = event(blocking=True)
        return self._arrived

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._arrived is not None:
            self._arrived.synchronize()

    @property
    def is_free(self) -> bool:
        """Whether no saver uses it."""
        return not self._users

    def taken(self, step: int) -> None:
        """Register the first saver, with the step of the state."""
        self._step, self._users = step, 1

    def shared(self, step: int) -> bool:
        """Register a further saver if the copy still holds that step for another one; return
        whether."""
        with self._lock:
            is_same = bool(self._users) and self._step == step
            self._users += is_same
            return is_same

    def release(self) -> None:
        """Unregister a saver."""
        with self._lock:
            self._users -= 1

    def fill_from_gpu(self, state: dict[str, Any]) -> None:
        """Start to copy a state, on the current stream."""
        tensors = [tensor for tensor in _tensors(state) if tensor.device.type == "cuda"]
        layout = [(t.shape, t.dtype, local(t).shape) for t in tensors]
        # Pinned memory is kept from save to save while shapes stay the same.
        if layout != self._layout:
            self._buckets = [Bucket.of(members) for members in split_into_buckets(tensors)]
            self._layout = layout
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        hosts: dict[int, Tensor] = {}
        for bucket in self._buckets:
            bucket.copy([tensors[number] for number in bucket.members])
            hosts |= zip(bucket.members, bucket.parts, strict=True)
        self.state = _replace_by_host(state, lambda tensor: hosts[numbers[id(tensor)]])


@dataclass(frozen=True)
class Bucket:
    """Tensors that are copied together."""

    members: Sequence[int]
    """Indices of the tensors in the state."""
    host: Tensor
    """Bytes of all tensors, in pinned memory."""
    parts: Sequence[Tensor]
    """View of `host` for each tensor, with its shape and dtype."""

    @classmethod
    def of(cls, members: Sequence[tuple[int, Tensor]]) -> Bucket:
        """Allocate memory for these tensors, given with their indices."""
        shards = [local(tensor) for _, tensor in members]
        host = torch.empty(
            sum(map(_size, shards)),
            dtype=torch.uint8,
            pin_memory=shards[0].device.type == "cuda",
        )
        pieces = torch.split(host, [_size(shard) for shard in shards])
        parts = [
            piece.view(shard.dtype).view(shard.shape)
            for piece, shard in zip(pieces, shards, strict=True)
        ]
        return cls([number for number, _ in members], host, parts)

    def copy(self, tensors: Sequence[Tensor]) -> None:
        """Start to copy the tensors, in one copy."""
        raw = [_bytes(local(tensor)) for tensor in tensors]
        self.host.copy_(raw[0] if len(raw) == 1 else torch.cat(raw), non_blocking=True)


def split_into_buckets(tensors: Sequence[Tensor]) -> list[list[tuple[int, Tensor]]]:
    """Return tensors with their indices, in buckets of up to `BUCKET_BYTES`, or of one larger
    tensor.

    Two neighbouring buckets together exceed `BUCKET_BYTES`.
    """
    # Longest element types first, so that every tensor begins at a multiple of its element size.
    ordered = sorted(enumerate(tensors), key=lambda item: -item[1].element_size())
    buckets: list[list[tuple[int, Tensor]]] = []
    # Full at first, so that the first tensor opens a bucket.
    filled = BUCKET_BYTES
    for number, tensor in ordered:
        size = _size(local(tensor))
        if filled + size > BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append((number, tensor))
        filled += size
    return buckets


class StagedCopyStager(BlockingAsyncStager):
    """Stager that returns an existing copy to DCP."""

    def __init__(self, copy: StagedCopy) -> None:
        super().__init__()
        self._copy = copy

    @override
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return cast(dict[str, Any], self._copy.state)


def state_bytes(state: Any) -> int:
    """Return the bytes of this rank's shards of a state, nested dicts of tensors."""
    return sum(_size(local(tensor)) for tensor in _tensors(state))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _replace_by_host(value: Any, host: Callable[[Tensor], Tensor]) -> Any:
    """Return nested dicts with host tensors in place of those on a GPU."""
    if isinstance(value, dict):
        return {key: _replace_by_host(item, host) for key, item in value.items()}
    if not isinstance(value, Tensor):
        return value
    if value.device.type != "cuda":
        # Small ones, such as step counters of optimizers.
        return value.detach().clone()
    return shard_like(value, host(value))


def _copy_to_host(value: Any, into: Any) -> Any:
    """Return a copy of nested dicts of tensors in main memory, reusing tensors of `into` that
    fit."""
    if isinstance(value, dict):
        reusable = into if isinstance(into, dict) else {}
        return {key: _copy_to_host(item, reusable.get(key)) for key, item in value.items()}
    if not isinstance(value, Tensor):
        return value
    if not isinstance(into, Tensor) or into.shape != value.shape or into.dtype != value.dtype:
        return value.detach().to("cpu", copy=True)
    local(into).copy_(local(value))
    return into
