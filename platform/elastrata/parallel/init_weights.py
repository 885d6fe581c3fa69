"""Initialisation of a model that is sharded already: in main memory, one parameter after the other.

A model is built twice. The first time it is on the meta device, without memory; there it is
divided, and its shards are allocated. The second time it is built in main memory with the same
random numbers as an undivided model. At most one of its parameters has memory at a time, from which
this rank's shard is copied.
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

from elastrata.parallel.sharding import local, local_part
from elastrata.workload.workload import Workload
from elastrata_pipelines.format import Vocabulary

_registration_hook: Any = register_module_parameter_registration_hook
"""Context that calls a function with every parameter that any module registers. Untyped, as
torch declares that hooks return something."""
_OVERWRITING_OPS = ("aten::zero_", "aten::fill_")
"""In-place operators that overwrite all elements, in addition to the random ones."""


class DeferredModel:
    """A model on the meta device, ready to be divided and initialised.

    Args:
        build: builds the model on the current device, identically each time.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        parameters: list[nn.Parameter] = []
        self._build = build
        with _registration_hook(lambda _, __, parameter: parameters.append(parameter)):
            self.model = meta_model(build)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        # By the order of registration: the second model's parameters are other objects.
        self._names = [names.get(id(parameter)) for parameter in parameters]

    def draw(self, divided: nn.Module) -> None:
        """Initialise this rank's parameters and buffers.

        They are equal to the bit to those of a model that is built undivided on a CPU.

        Args:
            divided: this rank's parameters and buffers, under their names in the whole model, on
                any device.
        """
        self._build_again(divided, draws=True)

    def fill_buffers(self, divided: nn.Module) -> None:
        """Initialise the buffers only; costs nothing without buffers."""
        if next(divided.buffers(), None) is not None:
            self._build_again(divided, draws=False)

    @torch.no_grad()
    def _build_again(self, divided: nn.Module, *, draws: bool) -> None:
        init_mode = _InitMode(self._names, dict(divided.named_parameters()), draws=draws)
        with torch.device("cpu"), init_mode, _registration_hook(init_mode.track):
            model = self._build()
        init_mode.finish()
        buffers = dict(divided.named_buffers())
        for name, buffer in model.named_buffers():
            if name in buffers:
                local(buffers[name]).copy_(local_part(buffer, buffers[name]))


def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate uninitialised memory for a module on the meta device."""
    module._apply(lambda tensor: _allocate(tensor, device))  # type: ignore[no-untyped-call]


def _allocate(tensor: Tensor, device: torch.device) -> Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    # Not `to_empty`: torch caches layouts, which would refer to groups of an earlier mesh.
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
    """Name in the whole model; None if the model no longer has the parameter."""
    value: Tensor
    num_bytes: int
    is_kept: bool
    """It had values before a module registered it, so they cannot be repeated."""
    program: list[_Operation] = field(default_factory=list)
    """Operators that compute its values."""

    @property
    def is_freed(self) -> bool:
        return self.value.untyped_storage().nbytes() < self.num_bytes

    def free(self) -> None:
        if not self.is_kept:
            self.value.untyped_storage().resize_(0)

    def materialize(self, *, overwrites: bool) -> None:
        """Allocate its memory again, and repeat its operators unless the next one overwrites all
        elements."""
        if not self.is_freed:
            return
        self.value.untyped_storage().resize_(self.num_bytes)
        for operation in () if overwrites else self.program:
            operation.repeat(self.value)


@dataclass(frozen=True)
class _Operation:
    """An operator that changed a parameter in place."""

    function: Any
    place: tuple[Sequence[int], Sequence[int], int]
    """Sizes, strides and offset of the view that it changed."""
    others: tuple[Any, ...]
    keywords: Mapping[str, Any]
    generator_state: Tensor | None
    """Random state before the operator; None if it is not random."""

    def repeat(self, parameter: Tensor) -> None:
        rng_state = torch.get_rng_state()
        if self.generator_state is not None:
            torch.set_rng_state(self.generator_state)
        self.function(parameter.as_strided(*self.place), *self.others, **self.keywords)
        torch.set_rng_state(rng_state)


class _InitMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which a new module's parameters have memory only while they are initialised."""

    def __init__(
        self, names: Sequence[str | None], targets: Mapping[str, Tensor], *, draws: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._targets, self._draws = iter(names), targets, draws
        self._parameters: dict[int, _Parameter] = {}
        self._in_memory: list[_Parameter] = []
        self._uninitialized: set[int] = set()

    def track(self, _: nn.Module, __: str, parameter: nn.Parameter) -> None:
        """Track a parameter that a module has registered."""
        name, key = next(self._names), _key(parameter)
        if key in self._parameters:
            return
        num_bytes = parameter.untyped_storage().nbytes()
        is_blank = key in self._uninitialized
        new = _Parameter(name, parameter.detach(), num_bytes, is_kept=not is_blank)
        # The first operator that initialises it allocates the memory again.
        new.free()
        self._parameters[key] = new

    def finish(self) -> None:
        """Copy the remaining parameters."""
        # A tied or kept parameter may still be in memory.
        self._free_all_but([])
        for parameter in self._parameters.values():
            if parameter.is_kept:
                self._copy(parameter)

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        used = list(self._parameters_among(args, keywords))
        target = (
            used[0]
            if used and func._schema.is_mutable and _shares_storage(args[0], used[0])
            else None
        )
        # Only buffers are wanted, and these do not depend on the parameters' values.
        if target and not self._draws:
            return args[0]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_overwrite = (is_random or func.name().partition(".")[0] in _OVERWRITING_OPS) and (
            target is not None and args[0].numel() == target.value.numel()
        )
        # A new tensor may need the memory of the parameters that are complete.
        if used or func.name().startswith("aten::empty"):
            self._free_all_but(used)
        for parameter in used:
            parameter.materialize(overwrites=is_overwrite and parameter is target)
        if target:
            operation = _operation(func, args, keywords, is_random=is_random)
            target.program = [operation] if is_overwrite else [*target.program, operation]
        out = func(*args, **keywords)
        self._track_uninitialized(func, out)
        return out

    def _parameters_among(self, *arguments: Any) -> Iterator[_Parameter]:
        """Return the parameters among an operator's arguments, each once."""
        keys = dict.fromkeys(_key(x) for x in tree_iter(arguments) if isinstance(x, Tensor))
        return (self._parameters[key] for key in keys if key in self._parameters)

    def _free_all_but(self, used: Sequence[_Parameter]) -> None:
        """Copy and free all parameters except those of the current operator."""
        for parameter in self._in_memory:
            if parameter not in used:
                self._copy(parameter)
                parameter.free()
        self._in_memory = list(used)

    def _copy(self, parameter: _Parameter) -> None:
        target = self._targets.get(parameter.name or "")
        if target is not None and self._draws:
            local(target).copy_(local_part(parameter.value, target))

    def _track_uninitialized(self, func: Any, out: Any) -> None:
        """Track which memory has not been written yet."""
        if isinstance(out, Tensor):
            is_blank = func.name().startswith("aten::empty")
            # `nn.Parameter(torch.empty(...))` makes such views, which do not write.
            same = func.name() in ("aten::detach", "aten::alias")
            if is_blank:
                self._uninitialized.add(_key(out))
            elif not same:
                self._uninitialized.discard(_key(out))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _shares_storage(value: Any, parameter: _Parameter) -> bool:
    return isinstance(value, Tensor) and _key(value) == _key(parameter.value)


def _operation(
    func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any], *, is_random: bool
) -> _Operation:
    """Return the operator with copies of its arguments."""
    target, *others = args
    # Copies, as later operators may change the arguments.
    arguments = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tuple(others))
    state = torch.get_rng_state() if is_random else None
    place = (target.size(), target.stride(), target.storage_offset())
    return _Operation(func, place, arguments, keywords, state)


def meta_model(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that `build` makes, on the meta device."""
    with torch.device("meta"), _SkipRandomInit():  # type: ignore[no-untyped-call]
        return build()


class _SkipRandomInit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that skips random in-place operators on tensors of the meta device."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        target = args[0] if args else None
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_in_place = func.overloadpacket.__name__.endswith("_")
        # These tensors have no elements, but drawing them takes two thirds of the time: half a
        # minute for a model of 10,000 blocks.
        if is_random and is_in_place and isinstance(target, Tensor) and target.is_meta:
            return target
        return func(*args, **(kwargs or {}))


_MORE_IDS = 2**21
"""More than any multiple that tables are padded to."""


def tensor_shapes(
    workload: Workload, vocabulary: Vocabulary, seq_len: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a workload's model, by name."""
    model = meta_model(lambda: workload.build_model(vocabulary, seq_len))
    state: dict[str, Tensor] = model.state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


@cache
def id_tables(workload: Workload, vocabulary: Vocabulary, seq_len: int) -> frozenset[str]:
    """Return the names of the tensors whose first dim grows with the vocabulary."""
    larger = vocabulary.model_copy(update={"size": workload.num_ids(vocabulary) + _MORE_IDS})
    before, after = (tensor_shapes(workload, v, seq_len) for v in (vocabulary, larger))
    return frozenset(name for name, shape in before.items() if after[name] != shape)


def partial_tables(
    workload: Workload,
    vocabulary: Vocabulary,
    seq_len: int,
    given: Mapping[str, tuple[int, ...]],
    num_ids: int,
) -> dict[str, int]:
    """Return the tables that take only the rows of `num_ids` ids from given tensors.

    Args:
        workload: workload of the model.
        vocabulary: vocabulary of its data.
        seq_len: sequence length of its data.
        given: shapes of the given tensors, by the names of this model.
        num_ids: number of ids of the given tensors.
    """
    shapes = tensor_shapes(workload, vocabulary, seq_len)
    return {
        name: num_ids
        for name in id_tables(workload, vocabulary, seq_len)
        if num_ids < workload.num_ids(vocabulary) or given[name] != shapes[name]
    }
