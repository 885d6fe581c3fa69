"""A model without its numbers: shapes and names, which take neither memory nor much time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override


def meta_model(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build` makes, on the meta device."""
    with torch.device("meta"), _Undrawn():  # type: ignore[no-untyped-call]
        return build()


class _Undrawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it lasts, no random numbers are drawn into tensors of the meta device, which have none.

    Drawing them there takes two thirds of the time: half a minute for a model of 10,000 blocks.
    """

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        target = args[0] if args else None
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_in_place = func.overloadpacket.__name__.endswith("_")
        if is_random and is_in_place and isinstance(target, Tensor) and target.is_meta:
            return target
        return func(*args, **(kwargs or {}))
