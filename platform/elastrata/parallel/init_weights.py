"""The first weights of a model that is sharded already: drawn one parameter after the other, in
main memory, whatever device the model is on.

A model is built twice. On the meta device it has neither numbers nor memory: so it is divided, and
its shards get memory. Then it is built again, in main memory, by the very draws that it has always
been made by; there is never more than one of its parameters there at a time, of which this rank's
shard is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from typing_extensions import override

from elastrata.parallel.sharding import local, own_part
from elastrata.workload.workload import Workload
from elastrata_pipelines.format import Vocabulary

_when_registered: Any = register_module_parameter_registration_hook
"""Calls a function with every parameter that any module gets, while its block lasts. Untyped, as
torch declares that hooks return something."""
_SET = ("aten::zero_", "aten::fill_")
"""In-place operators that leave nothing of what was there, beside those that draw."""


class Outline:
    """A model on the meta device, to be divided, and how to get its first numbers.

    Args:
        build: makes the model on the current device; the same one each time.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        registered: list[nn.Parameter] = []
        self._build = build
        with _when_registered(lambda _, __, parameter: registered.append(parameter)):
            self.model = meta_model(build)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._names = [names.get(id(parameter)) for parameter in registered]

    def draw(self, divided: nn.Module) -> None:
        """Gives what this rank has of the model its first weights: those that the model has when it
        is built whole on a CPU, to the bit.

        Args:
            divided: has the parameters and buffers that this rank has, under their names in the
                whole model, on whatever device.
        """
        self._build_again(divided, draws=True)

    def fill_buffers(self, divided: nn.Module) -> None:
        """Gives buffers alone their numbers; at no cost where there are none."""
        if next(divided.buffers(), None) is not None:
            self._build_again(divided, draws=False)

    @torch.no_grad()
    def _build_again(self, divided: nn.Module, *, draws: bool) -> None:
        drawing = _Drawing(self._names, dict(divided.named_parameters()), draws=draws)
        with torch.device("cpu"), drawing, _when_registered(drawing.registered):
            model = self._build()
        drawing.finish()
        buffers = dict(divided.named_buffers())
        for name, buffer in model.named_buffers():
            if name in buffers:
                local(buffers[name]).copy_(own_part(buffer, buffers[name]))


def allocate(module: nn.Module, device: torch.device) -> None:
    """Gives the parameters and buffers of a module on the meta device memory, without numbers."""
    module._apply(lambda tensor: _allocated(tensor, device))  # type: ignore[no-untyped-call]


def _allocated(tensor: Tensor, device: torch.device) -> Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    # Not as `to_empty`: torch remembers layouts, and with them the groups of an earlier mesh.
    return DTensor.from_local(
        torch.empty_like(local(tensor), device=device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@dataclass(eq=False)
class _Parameter:
    """A parameter of the model that is being built."""

    name: str | None
    """In the whole model; None: the model has it no more."""
    value: Tensor
    num_bytes: int
    stays: bool
    """It had its numbers before a module had it, so they cannot be drawn again."""
    program: list[_Operation] = field(default_factory=list)
    """Operators that lead to its numbers."""

    @property
    def is_away(self) -> bool:
        return self.value.untyped_storage().nbytes() < self.num_bytes

    def leave(self) -> None:
        if not self.stays:
            self.value.untyped_storage().resize_(0)

    def come(self, *, anew: bool) -> None:
        """Takes memory again; its numbers come back unless all are to be set anew."""
        if not self.is_away:
            return
        self.value.untyped_storage().resize_(self.num_bytes)
        for operation in () if anew else self.program:
            operation.repeat(self.value)


@dataclass(frozen=True)
class _Operation:
    """An operator that changed a parameter in place."""

    function: Any
    place: tuple[Sequence[int], Sequence[int], int]
    """Sizes, strides and offset of what it changed."""
    others: tuple[Any, ...]
    named: Mapping[str, Any]
    generator_state: Tensor | None
    """Before it drew; None: it draws nothing."""

    def repeat(self, parameter: Tensor) -> None:
        now = torch.get_rng_state()
        if self.generator_state is not None:
            torch.set_rng_state(self.generator_state)
        self.function(parameter.as_strided(*self.place), *self.others, **self.named)
        torch.set_rng_state(now)


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it lasts, parameters of modules that are made take memory only while they get their
    numbers."""

    def __init__(
        self, names: Sequence[str | None], targets: Mapping[str, Tensor], *, draws: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._targets, self._draws = iter(names), targets, draws
        self._parameters: dict[int, _Parameter] = {}
        self._here: list[_Parameter] = []
        self._blank: set[int] = set()

    def registered(self, _: nn.Module, __: str, parameter: nn.Parameter) -> None:
        """A module has got a parameter."""
        name, key = next(self._names), _key(parameter)
        if key in self._parameters:
            return
        num_bytes = parameter.untyped_storage().nbytes()
        is_blank = key in self._blank
        new = _Parameter(name, parameter.detach(), num_bytes, stays=not is_blank)
        new.leave()
        self._parameters[key] = new

    def finish(self) -> None:
        """Copies what has not been copied yet."""
        self._only([])
        for parameter in self._parameters.values():
            if parameter.stays:
                self._copy(parameter)

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        used = list(self._of(args, named))
        changed = used[0] if used and func._schema.is_mutable and _is_of(args[0], used[0]) else None
        if changed and not self._draws:
            return args[0]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        sets_all = (is_random or func.name().partition(".")[0] in _SET) and (
            changed is not None and args[0].numel() == changed.value.numel()
        )
        if used or func.name().startswith("aten::empty"):
            self._only(used)
        for parameter in used:
            parameter.come(anew=sets_all and parameter is changed)
        if changed:
            operation = _operation(func, args, named, is_random=is_random)
            changed.program = [operation] if sets_all else [*changed.program, operation]
        out = func(*args, **named)
        self._note(func, out)
        return out

    def _of(self, *arguments: Any) -> Iterator[_Parameter]:
        """Parameters among the arguments of an operator, each once."""
        keys = dict.fromkeys(_key(x) for x in tree_iter(arguments) if isinstance(x, Tensor))
        return (self._parameters[key] for key in keys if key in self._parameters)

    def _only(self, used: Sequence[_Parameter]) -> None:
        """All others than these leave, and their numbers are copied."""
        for parameter in self._here:
            if parameter not in used:
                self._copy(parameter)
                parameter.leave()
        self._here = list(used)

    def _copy(self, parameter: _Parameter) -> None:
        target = self._targets.get(parameter.name or "")
        if target is not None and self._draws:
            local(target).copy_(own_part(parameter.value, target))

    def _note(self, func: Any, out: Any) -> None:
        """Which memory nobody has written to yet."""
        if isinstance(out, Tensor):
            is_blank = func.name().startswith("aten::empty")
            same = func.name() in ("aten::detach", "aten::alias")
            if is_blank:
                self._blank.add(_key(out))
            elif not same:
                self._blank.discard(_key(out))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_of(value: Any, parameter: _Parameter) -> bool:
    return isinstance(value, Tensor) and _key(value) == _key(parameter.value)


def _operation(
    func: Any, args: tuple[Any, ...], named: Mapping[str, Any], *, is_random: bool
) -> _Operation:
    """The operator with its arguments as they are now."""
    target, *others = args
    kept = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tuple(others))
    state = torch.get_rng_state() if is_random else None
    place = (target.size(), target.stride(), target.storage_offset())
    return _Operation(func, place, kept, named, state)


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


_MORE_IDS = 2**21
"""More than any multiple that tables are filled up to."""


def sizes(workload: Workload, vocabulary: Vocabulary, seq_len: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a workload's model, by name."""
    model = meta_model(lambda: workload.build_model(vocabulary, seq_len))
    state: dict[str, Tensor] = model.state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


@cache
def id_tables(workload: Workload, vocabulary: Vocabulary, seq_len: int) -> frozenset[str]:
    """The names of the tensors whose first dim grows with the vocabulary, all else as it is."""
    larger = vocabulary.model_copy(update={"size": vocabulary.size + _MORE_IDS})
    before, after = (sizes(workload, v, seq_len) for v in (vocabulary, larger))
    return frozenset(name for name, shape in before.items() if after[name] != shape)


def counted_rows(
    workload: Workload,
    vocabulary: Vocabulary,
    seq_len: int,
    given: Mapping[str, tuple[int, ...]],
    num_ids: int,
) -> dict[str, int]:
    """The tables that take the rows of so many ids, and not all, from given ones.

    Args:
        workload: its model's tables are meant.
        vocabulary: of its data.
        seq_len: of its data.
        given: the shapes of other tensors, by the names of this model.
        num_ids: that the given ones know.
    """
    wanted = sizes(workload, vocabulary, seq_len)
    return {
        name: num_ids
        for name in id_tables(workload, vocabulary, seq_len)
        if num_ids < vocabulary.size or given[name] != wanted[name]
    }
