"""A model with the numbers of some of its parameters, or of none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

_Hook = Callable[[nn.Module, str, nn.Parameter], nn.Parameter | None]


def partial_model(
    build: Callable[[], nn.Module],
    wanted: Callable[[nn.Module], Iterable[nn.Parameter]],
    device: torch.device,
) -> nn.Module:
    """The model that `build` makes on a device, with the numbers of some parameters; the others are
    on the meta device, where they take no memory.

    What there is has the very numbers that it has in the whole model: those of the others are drawn
    from torch's generator all the same, one parameter at a time, and dropped. Buffers are there.

    Args:
        build: makes the model; on the meta device and on `device` alike.
        wanted: those of the parameters of a model on the meta device.
        device: of what is wanted.
    """
    outlines: list[nn.Parameter] = []
    with torch.device("meta"), _Registered(lambda _, __, parameter: outlines.append(parameter)):
        outline = build()
    chosen = {id(parameter) for parameter in wanted(outline)}
    is_wanted = [id(parameter) in chosen for parameter in outlines]
    number = count()

    def keep_or_drop(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if is_wanted[next(number)] or parameter.is_meta:
            return None
        empty = torch.empty_like(parameter, device="meta")
        return nn.Parameter(empty, requires_grad=parameter.requires_grad)

    with device, _Drawn(device), _Registered(keep_or_drop):
        return build()


class _Registered:
    """While it lasts, a function sees every parameter that any module gets, and may return another
    one in its place."""

    def __init__(self, function: _Hook) -> None:
        self._function = function

    def __enter__(self) -> None:
        hook: Any = self._function  # torch declares that hooks return nothing
        self._handle = register_module_parameter_registration_hook(hook)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


class _Drawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it lasts, random numbers are drawn for tensors on the meta device, too: the next ones
    are then those that come after them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        others: Mapping[str, Any] = kwargs or {}
        target = args[0] if args else None
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and isinstance(target, Tensor) and target.is_meta:
            func(torch.empty_like(target, device=self._device), *args[1:], **others)
        return func(*args, **others)


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
