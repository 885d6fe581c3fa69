"""The counterpart of a workload's model in transformers: the names and layouts of its tensors.

One table serves exports and runs that begin with given weights.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elastrata.workload.workload import Workload
from elastrata_pipelines.checked_json import describe_error
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Vocabulary

Shape = tuple[int, ...]
Box = tuple[slice, ...]
"""A range for each dim of a tensor."""
_OLD_SUFFIXES = {".gamma": ".weight", ".beta": ".bias"}
"""Suffixes of norms in files converted from TensorFlow, which transformers also renames."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The place of a parameter in a tensor of another model."""

    name: str
    """Name of the tensor."""
    transposed: bool = False
    """Whether the tensor is stored as [inputs, outputs]."""
    part: int = 0
    """Index of the parameter's part along its first dim."""
    parts: int = 1
    """Number of equal parts of the tensor."""

    def shape(self, ours: Shape) -> Shape:
        """Return the shape of the tensor for the parameter's shape."""
        whole = (self.parts * ours[0], *ours[1:])
        return whole[::-1] if self.transposed else whole

    def box(self, ours: Box, rows: int) -> Box:
        """Return the place in the tensor of a place in the parameter, which has `rows` rows."""
        first, *rest = ours
        shift = self.part * rows
        shifted = (slice(first.start + shift, first.stop + shift), *rest)
        return shifted[::-1] if self.transposed else shifted


@dataclass(frozen=True, kw_only=True)
class Counterpart:
    """A model in transformers with the same computation as a workload's model."""

    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Origins by parameter name; other parameters have the same name there."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Redundant names in a file, with the names of the tensors that they repeat."""
    fills_with_zeros: bool = False
    """Whether it has zeros for those of `origins` that our model does not have."""
    prefix: str = ""
    """Prefix that names lack in files of a model without its head."""
    unused: tuple[str, ...] = ()
    """Patterns of names without learned values, such as tables of angles."""
    left_out: tuple[str, ...] = ()
    """Patterns of names of parts that our model may do without."""

    def origin(self, name: str) -> Origin:
        """Return the origin of our parameter."""
        return self.origins.get(name) or Origin(name=name)

    def zeros(self, ours: Iterable[str]) -> set[str]:
        """Return the names of tensors with zeros, for which a model with these parameters has no
        parameter."""
        if not self.fills_with_zeros:
            return set()
        our_names = set(ours)
        return {origin.name for name, origin in self.origins.items() if name not in our_names}

    def known_names(self, given: Iterable[str], ours: Iterable[str]) -> dict[str, str]:
        """Return the names in a file by the corresponding names of this counterpart."""
        ours = list(ours)
        their_names = {*(self.origin(name).name for name in ours), *self.zeros(ours), *self.tied}
        names_by_ours = {}
        for name in given:
            plain = _replace_old_suffix(name)
            longer = f"{self.prefix}{plain}"
            # Add the prefix only if the longer name exists, so that unknown names are reported as
            # they are in the file.
            is_known = plain in their_names or not (
                longer in their_names or self._is_optional(longer)
            )
            names_by_ours[plain if is_known else longer] = name
        return names_by_ours

    def _is_optional(self, name: str) -> bool:
        return any(re.fullmatch(form, name) for form in (*self.unused, *self.left_out))

    def is_unused(self, name: str) -> bool:
        """Return whether a tensor has no learned values."""
        return any(re.fullmatch(form, name) for form in self.unused)

    def is_left_out(self, name: str) -> bool:
        """Return whether a tensor belongs to a part that our model may do without."""
        return any(re.fullmatch(form, name) for form in self.left_out)

    def to_theirs(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of their state dict from ours, one by one."""
        # Names first: `state` may read each tensor on access, so that only a few are in memory.
        parts: dict[str, dict[int, str]] = {}
        transposed: set[str] = set()
        for name in state:
            origin = self.origin(name)
            parts.setdefault(origin.name, {})[origin.part] = name
            transposed |= {origin.name} if origin.transposed else set()
        for their_name, part_names in parts.items():
            # Fused matrices, such as query, key and value, are parts in this order.
            value = _join([state[part_names[number]] for number in sorted(part_names)])
            yield their_name, value.T.contiguous() if their_name in transposed else value
        yield from self._zero_vectors(state)

    def _zero_vectors(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield biases of zeros, each of the length of its weight's rows."""
        if not self.fills_with_zeros:
            return
        missing = {o.name: (n, o.parts) for n, o in self.origins.items() if n not in state}
        for their_name, (name, parts) in missing.items():
            weight = state[f"{name.removesuffix('bias')}weight"]
            yield their_name, weight.new_zeros(parts * weight.shape[0])

    def to_ours(self, names: Iterable[str], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of our parameters that their state dict has."""
        ours = {}
        for name in names:
            origin = self.origin(name)
            if origin.name in weights:
                value = weights[origin.name]
                oriented = value.T if origin.transposed else value
                ours[name] = oriented.chunk(origin.parts)[origin.part].contiguous()
        return ours


class HasCounterpart(Workload):
    """A workload whose models also exist in transformers, so that runs can begin with such a
    folder."""

    @classmethod
    @abstractmethod
    def settings_of(cls, config: Any) -> dict[str, Any] | None:
        """Return the workload's keys for a transformers configuration; None for another kind of
        model.

        Raises:
            UserError: it is a model of this kind, but has a part that this workload does not
                support.
        """

    @abstractmethod
    def counterpart(self, vocabulary: Vocabulary) -> Counterpart:
        """Return the counterpart of this workload's model.

        Raises:
            UserError: transformers has no such model.
        """


def read_settings(workload: type[HasCounterpart], config: Any, where: str) -> dict[str, Any] | None:
    """Return `settings_of` a configuration that may have values of any type.

    Args:
        workload: a workload.
        config: the configuration.
        where: its file, for errors.

    Raises:
        UserError: the workload does not support a part of it, or a value has a wrong type.
    """
    try:
        return workload.settings_of(config)
    except UserError as error:
        raise UserError(*(f"{where}: {line}" for line in error.problems)) from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{where}: a value has a wrong type: {describe_error(error)}; expected the file as "
            "transformers writes it"
        ) from None


def _replace_old_suffix(name: str) -> str:
    for old, new in _OLD_SUFFIXES.items():
        if name.endswith(old):
            return f"{name.removesuffix(old)}{new}"
    return name


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
