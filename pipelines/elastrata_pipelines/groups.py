"""Groups: consecutive steps that are read and dealt together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from typing_extensions import override

from elastrata_pipelines.batch_size_warmup import (
    BatchSizeWarmup,
    batch_size_at,
    steps_of_equal_size,
)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Consecutive steps of one batch size."""

    first_step: int
    """Steps done before this group."""
    first_position: int
    num_steps: int
    batch_size: int


class Groups(Sequence[Group]):
    """The groups of a phase that are left: a single step first, then doubling in size, so that the
    first batch comes soon and the rest in bulk.

    Those that are alike are made where somebody asks for them: a run may have millions.

    Args:
        done: steps of the phase that are done.
        position: of the next sample.
        steps: of the phase.
        batch_size: samples of a step after the warm-up.
        most: steps of a group, at most.
        warmup: of the batch size.
        before: steps of the run before the phase.
    """

    def __init__(
        self,
        *,
        done: int,
        position: int,
        steps: int,
        batch_size: int,
        most: int,
        warmup: BatchSizeWarmup | None = None,
        before: int = 0,
    ) -> None:
        self._batch_size, self._most, self._before = batch_size, most, before
        self._first: list[Group] = []
        size = 1
        while done < steps and (size < most or (warmup and done < warmup.steps)):
            group = Group(
                first_step=before + done,
                first_position=position,
                num_steps=steps_of_equal_size(
                    done, min(size, steps - done), full=batch_size, warmup=warmup
                ),
                batch_size=batch_size_at(done, full=batch_size, warmup=warmup),
            )
            self._first.append(group)
            done, position = done + group.num_steps, position + group.num_steps * group.batch_size
            size = min(2 * size, most)
        self._done, self._position, self._left = done, position, max(0, steps - done)

    @override
    def __len__(self) -> int:
        return len(self._first) + -(-self._left // self._most)

    @overload
    def __getitem__(self, number: int) -> Group: ...

    @overload
    def __getitem__(self, number: slice) -> list[Group]: ...

    @override
    def __getitem__(self, number: int | slice) -> Group | list[Group]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        if number < len(self._first):
            return self._first[number]
        behind = (number - len(self._first)) * self._most
        return Group(
            first_step=self._before + self._done + behind,
            first_position=self._position + behind * self._batch_size,
            num_steps=min(self._most, self._left - behind),
            batch_size=self._batch_size,
        )
