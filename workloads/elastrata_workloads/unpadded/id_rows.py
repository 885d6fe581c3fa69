"""The weights of a model without the rows that are no ids' (`embedding_multiple`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override


@dataclass(frozen=True)
class IdRows(Mapping[str, Tensor]):
    """A state dict whose tables of the vocabulary end with the last id. Tensors are taken from the
    whole one when they are asked for, so that one that reads them is read but once each."""

    state: Mapping[str, Tensor]
    tables: Collection[str]
    """Names of the tensors with a row for every id."""
    num_ids: int

    @override
    def __getitem__(self, name: str) -> Tensor:
        value = self.state[name].detach()
        return value[: self.num_ids] if name in self.tables else value

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    @override
    def __len__(self) -> int:
        return len(self.state)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self.state
