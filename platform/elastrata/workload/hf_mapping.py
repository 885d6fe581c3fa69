"""The counterpart of a workload's model in transformers: where each of its tensors lies there.

One table for both ways: an export is made by it, and a run that begins with weights reads by it.
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
from elastrata_pipelines.format import Vocabulary

Shape = tuple[int, ...]
Box = tuple[slice, ...]
"""A range in each dim of a tensor."""
_OLD_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}
"""Of norms, in files from TensorFlow's days; transformers renames them, too."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The place of a parameter's numbers in the tensor of another model."""

    name: str
    """The tensor's."""
    transposed: bool = False
    """A matrix that is [inputs, outputs] there."""
    part: int = 0
    """Along our first dim it is this one..."""
    parts: int = 1
    """... of so many equal parts of the tensor."""

    def shape(self, ours: Shape) -> Shape:
        """The tensor's, from the parameter's."""
        whole = (self.parts * ours[0], *ours[1:])
        return whole[::-1] if self.transposed else whole

    def box(self, ours: Box, rows: int) -> Box:
        """The place in the tensor of a place in the parameter, which has so many rows."""
        first, *rest = ours
        shift = self.part * rows
        moved = (slice(first.start + shift, first.stop + shift), *rest)
        return moved[::-1] if self.transposed else moved


@dataclass(frozen=True, kw_only=True)
class Counterpart:
    """A model in transformers that computes what a workload's model does."""

    origins: Mapping[str, Origin] = field(default_factory=dict)
    """By our name; a parameter that is not among them has the same name there."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that a file may have beside others that hold the same numbers."""
    fills_with_zeros: bool = False
    """Whether it has zeros where `origins` has a parameter and our model has none."""
    prefix: str = ""
    """What names in the file of a model without its head leave out."""
    unused: tuple[str, ...] = ()
    """Patterns of names that hold nothing which was learned, such as tables of angles."""
    left_out: tuple[str, ...] = ()
    """Patterns of names that hold a part which our model does without, and may."""

    def origin(self, name: str) -> Origin:
        """Of our parameter of that name."""
        return self.origins.get(name) or Origin(name=name)

    def zeros(self, ours: Iterable[str]) -> set[str]:
        """Their tensors, all zeros, for which a model with these parameters has none."""
        if not self.fills_with_zeros:
            return set()
        known = set(ours)
        return {origin.name for name, origin in self.origins.items() if name not in known}

    def known_names(self, given: Iterable[str], ours: Iterable[str]) -> dict[str, str]:
        """The names of a file, by those that they have here."""
        ours = list(ours)
        known = {*(self.origin(name).name for name in ours), *self.zeros(ours), *self.tied}
        found = {}
        for name in given:
            plain = _without_old_ending(name)
            longer = f"{self.prefix}{plain}"
            is_known = plain in known or not (longer in known or self._may_be(longer))
            found[plain if is_known else longer] = name
        return found

    def _may_be(self, name: str) -> bool:
        return any(re.fullmatch(form, name) for form in (*self.unused, *self.left_out))

    def is_unused(self, name: str) -> bool:
        """Whether nothing is lost without it."""
        return any(re.fullmatch(form, name) for form in self.unused)

    def is_left_out(self, name: str) -> bool:
        """Whether it belongs to a part that our model does without."""
        return any(re.fullmatch(form, name) for form in self.left_out)

    def to_theirs(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of their state dict from ours, one after the other; none of ours is
        looked up before it is needed."""
        parts: dict[str, dict[int, str]] = {}
        turned: set[str] = set()
        for name in state:
            origin = self.origin(name)
            parts.setdefault(origin.name, {})[origin.part] = name
            turned |= {origin.name} if origin.transposed else set()
        for theirs, found in parts.items():
            value = _joined([state[found[number]] for number in sorted(found)])
            yield theirs, value.T.contiguous() if theirs in turned else value
        yield from self._zero_vectors(state)

    def _zero_vectors(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Biases: as long as their weights have rows."""
        if not self.fills_with_zeros:
            return
        missing = {o.name: (n, o.parts) for n, o in self.origins.items() if n not in state}
        for theirs, (name, parts) in missing.items():
            weight = state[f"{name.removesuffix('bias')}weight"]
            yield theirs, weight.new_zeros(parts * weight.shape[0])

    def to_ours(self, names: Iterable[str], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of our parameters that theirs has, from its state dict."""
        ours = {}
        for name in names:
            origin = self.origin(name)
            if origin.name in weights:
                value = weights[origin.name]
                turned = value.T if origin.transposed else value
                ours[name] = turned.chunk(origin.parts)[origin.part].contiguous()
        return ours


class HasCounterpart(Workload):
    """A workload whose models transformers has, too: runs of it can begin with such a folder."""

    @classmethod
    @abstractmethod
    def settings_of(cls, config: Any) -> dict[str, Any] | None:
        """The keys by which it is the model of a transformers configuration; None where that has
        another model.

        Raises:
            UserError: it is a model of this kind with a part that this workload lacks.
        """

    @abstractmethod
    def counterpart(self, vocabulary: Vocabulary) -> Counterpart:
        """Where its parameters lie in transformers' model.

        Raises:
            UserError: transformers has no such model.
        """


def _without_old_ending(name: str) -> str:
    for old, new in _OLD_ENDINGS.items():
        if name.endswith(old):
            return f"{name.removesuffix(old)}{new}"
    return name


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
