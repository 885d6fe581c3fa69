"""The space of a sweep: the values that each key may have, and the points of all keys together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from typing_extensions import override

from elastrata.config import Config
from elastrata_pipelines.errors import suggest_nearest

# These limits keep `high - low` and `high / low` finite.
_LEAST = 1e-100
_MOST_CHOICES, _MOST_POINTS = 1000, 100_000
Finite = Annotated[float, Field(ge=-1e100, le=1e100)]
Value = bool | int | Annotated[float, Field(allow_inf_nan=True)] | str | None
Ends = tuple[Finite, Finite]
# Floats hold whole numbers exactly up to 2**53.
Whole = Annotated[int, Field(ge=-(2**53), le=2**53)]
WholeEnds = tuple[Whole, Whole]
Values = Annotated[tuple[Value, ...], Field(min_length=1, max_length=_MOST_CHOICES)]
Conditions = Mapping[str, Value | tuple[Value, ...]]


class DomainKeys(Config):
    """Keys that every domain has, and the methods that searchers call."""

    when: Conditions = Field(default_factory=dict)
    """Values of other keys of the space, one or a list each, on which this key depends:
    `{optimizer.name: lamb}`."""

    def problems(self) -> list[str]:
        """Return a line per mistake in the domain, without its key."""
        return []

    def value_at(self, share: float) -> Value:
        """Return the value at a share (0 to 1) of the domain."""
        raise NotImplementedError

    def share_of(self, value: Value) -> float:
        """Return the share (0 to 1) of the domain at which a value is; the inverse of
        `value_at`."""
        raise NotImplementedError

    def grid(self) -> tuple[Value, ...] | None:
        """Return the values of a grid; None if the domain does not define their number."""
        raise NotImplementedError

    def extremes(self) -> tuple[Value, ...]:
        """Return the values to check against a recipe: the ends of a range, or all choices."""
        raise NotImplementedError


class _Range(DomainKeys):
    points: Annotated[int, Field(gt=0, le=_MOST_POINTS)] | None = None
    """Number of values that a grid takes from the range, including its ends."""

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        raise NotImplementedError

    @override
    def problems(self) -> list[str]:
        low, high = self.ends
        return [] if low < high else [f"[{low:g}, {high:g}]: expected the smaller value first"]

    @override
    def grid(self) -> tuple[Value, ...] | None:
        if self.points is None:
            return None
        shares = [index / max(1, self.points - 1) for index in range(self.points)]
        # A range of whole numbers may hold fewer values than `points`.
        return tuple(dict.fromkeys(self.value_at(share) for share in shares))

    @override
    def extremes(self) -> tuple[Value, ...]:
        return (self.value_at(0.0), self.value_at(1.0))


class Uniform(_Range):
    """Number from a range, each value equally likely."""

    uniform: Ends
    """Smallest and largest value."""

    @property
    @override
    def ends(self) -> tuple[float, float]:
        return self.uniform

    @override
    def value_at(self, share: float) -> float:
        low, high = self.uniform
        return min(high, low + share * (high - low))

    @override
    def share_of(self, value: Value) -> float:
        low, high = self.uniform
        return (_number(value) - low) / (high - low)


class LogUniform(_Range):
    """Number from a range, each order of magnitude equally likely."""

    loguniform: Ends
    """Smallest value, above 0, and largest value."""

    @property
    @override
    def ends(self) -> tuple[float, float]:
        return self.loguniform

    @override
    def problems(self) -> list[str]:
        low, high = self.loguniform
        if low < _LEAST:
            return [f"[{low:g}, {high:g}]: expected ends above {0 if low <= 0 else _LEAST:g}"]
        return super().problems()

    @override
    def value_at(self, share: float) -> float:
        low, high = self.loguniform
        # Rounding may exceed an end by a unit in the last place.
        return max(low, min(high, float(low * (high / low) ** share)))

    @override
    def share_of(self, value: Value) -> float:
        low, high = self.loguniform
        return math.log(_number(value) / low) / math.log(high / low)


class Int(_Range):
    """Whole number from a range that includes both ends, each equally likely."""

    int: WholeEnds
    """Smallest and largest value."""

    @property
    @override
    def ends(self) -> tuple[float, float]:
        return self.int

    @override
    def value_at(self, share: float) -> Value:
        low, high = self.int
        return min(high, low + math.floor(share * (high - low + 1)))

    @override
    def share_of(self, value: Value) -> float:
        low, high = self.int
        return (_number(value) - low) / (high - low)

    @override
    def grid(self) -> tuple[Value, ...] | None:
        low, high = self.int
        if self.points is None and high - low < _MOST_POINTS:
            return tuple(range(low, high + 1))
        return super().grid()


class Choice(DomainKeys):
    """One of several values, each equally likely."""

    choice: Values
    """Values to choose from."""

    @override
    def problems(self) -> list[str]:
        counts = Counter(map(repr, self.choice))
        return [f"{value}: listed twice" for value in sorted(counts) if counts[value] > 1]

    @override
    def value_at(self, share: float) -> Value:
        return self.choice[min(len(self.choice) - 1, int(share * len(self.choice)))]

    @override
    def share_of(self, value: Value) -> float:
        return self.choice.index(value) / max(1, len(self.choice) - 1)

    @override
    def grid(self) -> tuple[Value, ...] | None:
        return self.choice

    @override
    def extremes(self) -> tuple[Value, ...]:
        return self.choice


_KINDS = ("uniform", "loguniform", "int", "choice")


def _check_one_kind(value: Any) -> Any:
    if isinstance(value, Mapping) and len(value.keys() & set(_KINDS)) != 1:
        unknown_key = next((str(key) for key in value if key not in DomainKeys.model_fields), "")
        raise ValueError(
            f"expected one of {', '.join(_KINDS)}{suggest_nearest(unknown_key, _KINDS)}"
        )
    return value


Domain = Annotated[Uniform | LogUniform | Int | Choice, BeforeValidator(_check_one_kind)]
"""One of the domains; its key, such as `uniform`, selects which."""


def allowed_values(condition: Value | Sequence[Value]) -> tuple[Value, ...]:
    """Return the values that a condition allows."""
    # A string is a sequence, but one value.
    if isinstance(condition, str) or not isinstance(condition, Sequence):
        return (condition,)
    return tuple(condition)


def _number(value: Any) -> float:
    return float(value)


Point = dict[str, Value]
"""Values by dotted key; a key whose condition does not hold is absent."""


def is_active(domain: Domain, point: Mapping[str, Value]) -> bool:
    """Return whether the key of a domain has a value, given the values of `point`."""
    return all(
        key in point and point[key] in allowed_values(condition)
        for key, condition in domain.when.items()
    )


def sort_keys(space: Mapping[str, Domain]) -> list[str]:
    """Return the keys so that each comes after those it depends on, otherwise as they were written.

    Raises:
        ValueError: keys depend on each other.
    """
    ordered: list[str] = []
    remaining = dict(space)
    while remaining:
        ready = [
            key for key, domain in remaining.items() if not domain.when.keys() & remaining.keys()
        ]
        if not ready:
            raise ValueError(f"{' and '.join(remaining)} depend on each other")
        ordered += ready
        remaining = {key: domain for key, domain in remaining.items() if key not in ready}
    return ordered


def draw(space: Mapping[str, Domain], value: Callable[[str, Domain], Value]) -> Point:
    """Return a point whose values are chosen key by key.

    Args:
        space: domains by key.
        value: returns the value of an active key.
    """
    point: Point = {}
    for key in sort_keys(space):
        if is_active(space[key], point):
            point[key] = value(key, space[key])
    return point


def grid_points(space: Mapping[str, Domain]) -> Iterator[Point]:
    """Yield all points of the grid; the last key varies fastest.

    Raises:
        ValueError: a range does not define how many of its values belong to the grid.
    """
    keys = sort_keys(space)

    def extend(point: Point, position: int) -> Iterator[Point]:
        if position == len(keys):
            yield point
            return
        key = keys[position]
        if not is_active(space[key], point):
            yield from extend(point, position + 1)
            return
        values = space[key].grid()
        if values is None:
            raise ValueError(f"{key} has no points")
        for value in values:
            yield from extend({**point, key: value}, position + 1)

    yield from extend({}, 0)


def activating_values(space: Mapping[str, Domain], key: str) -> Point:
    """Return the values that other keys must have for `key` to be active."""
    point: Point = {}
    pending_keys = [key]
    while pending_keys:
        for other, condition in space[pending_keys.pop()].when.items():
            if other not in point:
                point[other] = allowed_values(condition)[0]
                # The other key may be conditional, too.
                pending_keys.append(other)
    return {other: point[other] for other in sort_keys(space) if other in point}


def condition_problems(space: Mapping[str, Domain]) -> Iterator[tuple[str, str]]:
    """Yield the key and a line for each mistake in a condition."""
    for key, domain in space.items():
        for other, condition in domain.when.items():
            parent = space.get(other)
            where = f"when.{other}"
            if not isinstance(parent, Choice):
                yield key, f"{where}: expected a key of the space with a choice"
                continue
            for value in allowed_values(condition):
                if value not in parent.choice:
                    listed = ", ".join(map(repr, parent.choice))
                    yield key, f"{where}: {value!r}: expected one of {listed}"
    try:
        sort_keys(space)
    except ValueError as error:
        yield next(iter(space)), str(error)
