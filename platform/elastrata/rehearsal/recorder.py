"""Answers what fake tensors cannot, and enters in a ledger what a GPU would be asked for."""

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
"""With them `torch.tensor` makes a tensor of the mode from one with numbers."""
_MOST_KNOWN = 4096
_WRITES_AT = (_aten.index_put_.default, _aten.index_put.default)
_COLLECTIVES = ("c10d::", "_c10d_functional::", "_dtensor::")
_NO_MESSAGES = ("wait_tensor",)
Axes = Callable[[dist.ProcessGroup], tuple[str, int]]
"""The name of a group's axis, and its number of ranks."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it lasts, numbers that the device has made read as 1, and the ledger is kept.

    Within a `FakeTensorMode`."""

    def __init__(self, fake: FakeTensorMode, ledger: Ledger, axes: Axes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake, self._ledger, self._axes = fake, ledger, axes
        self._pinned: Any = WeakIdKeyDictionary()
        self._known: Any = WeakIdKeyDictionary()
        self._answers = {
            _aten._local_scalar_dense.default: self._number,
            _aten.equal.default: self._number,
            _aten.nonzero.default: self._all_indices,
            _aten.masked_select.default: self._all_values,
            _aten.bincount.default: self._no_counts,
            _aten.index.Tensor: self._indexed,
            _aten._pin_memory.default: self._pin,
            _aten.is_pinned.default: self._is_pinned,
        }

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch.compile works under it."""
        return True

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes operators on local tensors first
        named: dict[str, Any] = kwargs or {}
        if active_fake_mode() is not self._fake:
            return func(*args, **named)
        if answer := self._answers.get(func):
            return answer(func, args, named)
        pins = named.pop("pin_memory", False) if "pin_memory" in named else False
        out = func(*args, **named)
        if pins:
            self._pinned[out.untyped_storage()] = True
        self._enter(func, args, named, out)
        return out

    def tolist(self, tensor: FakeTensor) -> Any:
        """The numbers of a tensor; of one on the device, for which the host waits once, those that
        were copied there and nobody has written to but a collective; else ones."""
        if tensor.is_cuda:
            self._ledger.host_waits("item")
        if (known := self._known.get(tensor)) is not None:
            return known.tolist()
        with unset_fake_temporarily():
            return torch.ones(tensor.shape, dtype=tensor.dtype).tolist()

    def _enter(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        name = func.name()
        if name.startswith(_COLLECTIVES):
            self._enter_collective(name, args, kwargs)
        elif func._schema.is_mutable:
            for written in _tensors(args[:1]):
                self._known.pop(written, None)
        if func is _aten.copy_.default:
            self._enter_copy(args[1], args[0], args[2:] == (True,) or kwargs.get("non_blocking"))
        elif func is _aten._to_copy.default:
            self._enter_copy(args[0], out, kwargs.get("non_blocking"))
            if (known := self._known.get(args[0])) is not None and out.dtype == known.dtype:
                self._known[out] = known
        elif func in _LIFTS and args[0].numel() <= _MOST_KNOWN:
            self._known[out] = args[0]
        elif func in _WRITES_AT and any(map(_is_mask, args[1])) and not _is_number(args[2]):
            self._shape_waits(args[0])
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self._ledger.entries.flops += count(*args, **kwargs, out_val=out)
        self._ledger.sees([t.untyped_storage() for t in _tensors(out) if t.is_cuda])

    def _enter_collective(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        kind = name.split("::")[1].split(".")[0].strip("_")
        if kind in _NO_MESSAGES:
            return
        tensors = _tensors((args, kwargs))
        lists = [given for given in (*args, *kwargs.values()) if isinstance(given, list)]
        sizes = [sum(map(_size, _tensors(given))) for given in lists]
        largest = max(tensors, key=_size, default=None)
        axis, ranks = self._axes(_group(args, kwargs))
        alone = _size(largest) if largest is not None else 0
        self._ledger.collective(
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
            known = self._known.get(args[0])
            self._ledger.host_waits("item")
            return _one(args[0].dtype) if known is None else known.item()
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            return _one(args[0].dtype)

    def _all_indices(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        """Every element is not zero."""
        values: Tensor = args[0]
        self._shape_waits(values)
        return values.new_zeros((values.numel(), values.dim()), dtype=torch.int64)

    def _all_values(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        """The mask is true everywhere."""
        values: Tensor = args[0]
        self._shape_waits(values)
        return values.new_zeros(max(values.numel(), args[1].numel()))

    def _no_counts(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """No number is above those that are asked for."""
        least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        values: Tensor = args[0]
        self._shape_waits(values)
        return values.new_zeros(max(1, least), dtype=torch.int64)

    def _indexed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Masks are true everywhere."""
        values, indices = args
        if any(map(_is_mask, indices)):
            self._shape_waits(values)
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


def _one(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _is_number(value: Tensor) -> bool:
    """Whether it is one number of the host: with a mask, that is a `masked_fill`, and has no
    shape to wait for."""
    return value.numel() == 1 and value.device.type == "cpu"


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_iter(values) if isinstance(value, Tensor)]


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _group(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dist.ProcessGroup:
    """The group among a collective's arguments: itself, or the last of its names."""
    values = [*args, *kwargs.values()]
    for value in values:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except RuntimeError:  # another class: how numbers are reduced
                continue
    name: Any = [value for value in values if isinstance(value, str)][-1]
    resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
    group: dist.ProcessGroup = resolve(name)
    return group
