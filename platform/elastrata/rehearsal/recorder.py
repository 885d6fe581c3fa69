"""Recorder of the work that a GPU would do, with answers to queries that fake tensors lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from elastrata.rehearsal.ledger import Ledger

_aten = torch.ops.aten
_LIFTS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)
"""`torch.tensor` calls these to make a fake tensor from one with values."""
_MAX_KNOWN_VALUES = 4096
_WRITES_AT = (_aten.index_put_.default, _aten.index_put.default)
_COLLECTIVES = ("c10d::", "_c10d_functional::", "_dtensor::")
_NO_MESSAGES = ("wait_tensor",)
Axes = Callable[[dist.ProcessGroup], tuple[str, int]]
"""Returns the name of a group's axis, and its number of ranks."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that keeps the ledger. Values computed on the device read as 1.

    Must be entered within a `FakeTensorMode`.
    """

    def __init__(self, fake: FakeTensorMode, ledger: Ledger, axes: Axes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake, self._ledger, self._axes = fake, ledger, axes
        self._pinned: Any = WeakIdKeyDictionary()
        self._known_values: Any = WeakIdKeyDictionary()
        self._answers = {
            _aten._local_scalar_dense.default: self._number,
            _aten.equal.default: self._number,
            _aten.nonzero.default: self._all_indices,
            _aten.masked_select.default: self._all_values,
            _aten.bincount.default: self._no_counts,
            _aten.index.Tensor: self._index,
            _aten._pin_memory.default: self._pin,
            _aten.is_pinned.default: self._is_pinned,
        }

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that torch.compile works under this mode."""
        return True

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor turns it into operators on local tensors first
        named: dict[str, Any] = kwargs or {}
        # Outside of the fake mode tensors are real, e.g. in meshes.
        if active_fake_mode() is not self._fake:
            return func(*args, **named)
        if answer := self._answers.get(func):
            return answer(func, args, named)
        pins = named.pop("pin_memory", False) if "pin_memory" in named else False
        out = func(*args, **named)
        # Fake tensors cannot be pinned, so the recorder remembers which ones would be.
        if pins:
            self._pinned[out.untyped_storage()] = True
        self._enter(func, args, named, out)
        return out

    def tolist(self, tensor: FakeTensor) -> Any:
        """Return the values of a tensor. Reading one on the device is a single wait of the host.

        Values that were copied to the device are kept until an operator other than a collective
        writes to the tensor; unknown values are ones.
        """
        if tensor.is_cuda:
            self._ledger.host_waits("item")
        if (known := self._known_values.get(tensor)) is not None:
            return known.tolist()
        with unset_fake_temporarily():
            return torch.ones(tensor.shape, dtype=tensor.dtype).tolist()

    def _enter(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        name = func.name()
        if name.startswith(_COLLECTIVES):
            self._enter_collective(name, args, kwargs)
        # The tensor no longer has its known values.
        elif func._schema.is_mutable:
            for written in _tensors(args[:1]):
                self._known_values.pop(written, None)
        if func is _aten.copy_.default:
            self._enter_copy(args[1], args[0], args[2:] == (True,) or kwargs.get("non_blocking"))
        elif func is _aten._to_copy.default:
            self._enter_copy(args[0], out, kwargs.get("non_blocking"))
            # A copy between host and device keeps its values.
            if (known := self._known_values.get(args[0])) is not None and out.dtype == known.dtype:
                self._known_values[out] = known
        # Only small tensors, whose values the step may read back, such as its sums.
        elif func in _LIFTS and args[0].numel() <= _MAX_KNOWN_VALUES:
            self._known_values[out] = args[0]
        elif func in _WRITES_AT and any(map(_is_mask, args[1])) and not _is_number(args[2]):
            self._shape_waits(args[0])
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self._ledger.entries.flops += count(*args, **kwargs, out_val=out)
        self._ledger.track_storages([t.untyped_storage() for t in _tensors(out) if t.is_cuda])

    def _enter_collective(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        kind = name.split("::")[1].split(".")[0].strip("_")
        if kind in _NO_MESSAGES:
            return
        tensors = _tensors((args, kwargs))
        lists = [given for given in (*args, *kwargs.values()) if isinstance(given, list)]
        sizes = [sum(map(_size, _tensors(given))) for given in lists]
        # The side with all ranks' parts: the output of a gather, the input of a scatter.
        largest = max(tensors, key=_size, default=None)
        axis, ranks = self._axes(_group(args, kwargs))
        alone = _size(largest) if largest is not None else 0
        self._ledger.add_collective(
            max([alone, *sizes]),
            kind=kind,
            axis=axis,
            ranks=ranks,
            dtype=str(largest.dtype).removeprefix("torch.") if largest is not None else "none",
            device=largest.device.type if largest is not None else "none",
        )

    def _enter_copy(self, source: Any, target: Any, non_blocking: Any) -> None:
        if not isinstance(source, Tensor) or source.device.type == target.device.type:
            return
        to_host = target.device.type == "cpu"
        host = target if to_host else source
        if {source.device.type, target.device.type} != {"cpu", "cuda"}:
            return
        self._ledger.copy(
            "to host" if to_host else "to device",
            _size(target),
            pinned=self._has_pinned(host),
            non_blocking=bool(non_blocking),
        )

    def _number(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if args[0].device.type == "cuda":
            known = self._known_values.get(args[0])
            self._ledger.host_waits("item")
            return _one_of_type(args[0].dtype) if known is None else known.item()
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            return _one_of_type(args[0].dtype)

    def _all_indices(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        """Return as many indices as there are elements: all values count as non-zero."""
        values: Tensor = args[0]
        self._shape_waits(values)
        return values.new_zeros((values.numel(), values.dim()), dtype=torch.int64)

    def _all_values(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        """Return as many values as there are elements: the mask counts as true everywhere."""
        values: Tensor = args[0]
        self._shape_waits(values)
        return values.new_zeros(max(values.numel(), args[1].numel()))

    def _no_counts(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return zeros, as many as requested at least: no value exceeds that number."""
        least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        values: Tensor = args[0]
        self._shape_waits(values)
        return values.new_zeros(max(1, least), dtype=torch.int64)

    def _index(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Index with masks that count as true everywhere."""
        values, indices = args
        if any(map(_is_mask, indices)):
            self._shape_waits(values)
            # A mask with n dimensions selects like n index tensors.
            wide: list[Any] = []
            for index in indices:
                if _is_mask(index):
                    flat = index.new_zeros(index.numel(), dtype=torch.int64)
                    wide += [flat] * index.dim()
                else:
                    wide.append(index)
            indices = wide
        out = func(values, indices, **kwargs)
        self._enter(func, (values, indices), kwargs, out)
        return out

    def _shape_waits(self, values: Tensor) -> None:
        if values.device.type == "cuda":
            self._ledger.host_waits("shape")

    def _pin(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        pinned: Tensor = args[0].clone(memory_format=torch.contiguous_format)
        self._pinned[pinned.untyped_storage()] = True
        return pinned

    def _is_pinned(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        return self._has_pinned(args[0])

    def _has_pinned(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return tensor.untyped_storage() in self._pinned
        return False


def _one_of_type(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _is_number(value: Tensor) -> bool:
    """Return whether a value is a single number of the host."""
    # With a mask, this is masked_fill, which does not wait for a shape.
    return value.numel() == 1 and value.device.type == "cpu"


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_iter(values) if isinstance(value, Tensor)]


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _group(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the group among a collective's arguments: an object, or else the last name."""
    arguments = [*args, *kwargs.values()]
    for value in arguments:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except RuntimeError:  # another class, such as the reduction's
                continue
    name: Any = [value for value in arguments if isinstance(value, str)][-1]
    resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
    group: dist.ProcessGroup = resolve(name)
    return group
