"""Counts the bytes of the tensors that come to be, as long as they live."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """While it lasts, counts every storage that an operator returns first, until it is freed, with
    as many bytes as it has now; those on the meta device have none."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._counted: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # first it becomes an operator on shards
        known = {x.untyped_storage()._cdata for x in _counted(args, kwargs)}
        out = func(*args, **(kwargs or {}))
        for value in _counted(out):
            storage = value.untyped_storage()
            if storage._cdata not in known:
                self._counted[storage._cdata] = StorageWeakRef(storage)
        self.peak = max(self.peak, self._now())
        return out

    def _now(self) -> int:
        total = 0
        for key, reference in list(self._counted.items()):
            if reference.expired():
                del self._counted[key]
            else:
                total += _bytes(reference)
        return total


def _bytes(reference: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


def _counted(*values: object) -> list[Tensor]:
    return [x for x in tree_iter(values) if isinstance(x, Tensor) and not x.is_meta]
