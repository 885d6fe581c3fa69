"""The space of a sweep: every point in it is a value for each key that has one there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from elastrata.sweeps.domains import Choice, Domain, Value, wanted

Point = dict[str, Value]
"""A value by dotted key; keys whose condition does not hold are not there."""


def is_active(domain: Domain, point: Mapping[str, Value]) -> bool:
    """Whether the key of that domain has a value beside those of `point`."""
    return all(
        key in point and point[key] in wanted(condition) for key, condition in domain.when.items()
    )


def in_order(space: Mapping[str, Domain]) -> list[str]:
    """The keys, those that others depend on before them, else as they were written.

    Raises:
        ValueError: two keys wait for each other.
    """
    ordered: list[str] = []
    left = dict(space)
    while left:
        ready = [key for key, domain in left.items() if not domain.when.keys() & left.keys()]
        if not ready:
            raise ValueError(f"{' and '.join(left)} depend on each other")
        ordered += ready
        left = {key: domain for key, domain in left.items() if key not in ready}
    return ordered


def draw(space: Mapping[str, Domain], value: Callable[[str, Domain], Value]) -> Point:
    """A point, its values chosen one after the other.

    Args:
        space: domains by key.
        value: chooses for a key that has a value.
    """
    point: Point = {}
    for key in in_order(space):
        if is_active(space[key], point):
            point[key] = value(key, space[key])
    return point


def grid_points(space: Mapping[str, Domain]) -> Iterator[Point]:
    """All points of the grid, the last key running fastest.

    Raises:
        ValueError: a range does not say how many of its values belong to the grid.
    """
    keys = in_order(space)

    def extended(point: Point, place: int) -> Iterator[Point]:
        if place == len(keys):
            yield point
            return
        key = keys[place]
        if not is_active(space[key], point):
            yield from extended(point, place + 1)
            return
        values = space[key].grid()
        if values is None:
            raise ValueError(f"{key} has no points")
        for value in values:
            yield from extended({**point, key: value}, place + 1)

    yield from extended({}, 0)


def reaching(space: Mapping[str, Domain], key: str) -> Point:
    """The values that other keys must have for `key` to have one."""
    point: Point = {}
    waiting = [key]
    while waiting:
        for other, condition in space[waiting.pop()].when.items():
            if other not in point:
                point[other] = wanted(condition)[0]
                waiting.append(other)
    return {other: point[other] for other in in_order(space) if other in point}


def condition_problems(space: Mapping[str, Domain]) -> Iterator[tuple[str, str]]:
    """The mistakes in the conditions: the key, and the line about it."""
    for key, domain in space.items():
        for other, condition in domain.when.items():
            parent = space.get(other)
            where = f"when.{other}"
            if not isinstance(parent, Choice):
                yield key, f"{where}: expected a key of the space with a choice"
                continue
            for value in wanted(condition):
                if value not in parent.choice:
                    listed = ", ".join(map(repr, parent.choice))
                    yield key, f"{where}: {value!r}: expected one of {listed}"
    try:
        in_order(space)
    except ValueError as error:
        yield next(iter(space)), str(error)
