"""The points of a sweep: domains, conditions, grids."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from elastrata.sweeps.scheduler import AshaConfig, clip_to_domains, first_rung
from elastrata.sweeps.space import (
    Choice,
    Domain,
    Int,
    LogUniform,
    Uniform,
    draw,
    grid_points,
)

SHARES = st.floats(0, 1)
SPACE = {
    "optimizer.trust_max": Uniform(uniform=(1, 10), points=2, when={"optimizer.name": "lamb"}),
    "optimizer.name": Choice(choice=("adamw", "lamb")),
    "optimizer.lr": LogUniform(loguniform=(1e-4, 1e-2), points=3),
}
"""The first key waits for the second."""


@given(share=SHARES, low=st.floats(1e-6, 1e3), factor=st.floats(1.01, 1e4))
def test_a_value_is_found_again_at_its_share(share: float, low: float, factor: float) -> None:
    for domain in (
        Uniform(uniform=(low, low * factor)),
        LogUniform(loguniform=(low, low * factor)),
    ):
        value = domain.value_at(share)
        assert low <= value <= low * factor
        assert domain.share_of(value) == pytest.approx(share, abs=1e-6)


@given(share=SHARES, low=st.integers(-50, 50), count=st.integers(2, 30))
def test_whole_numbers_and_choices_keep_to_their_values(share: float, low: int, count: int) -> None:
    values = tuple(range(low, low + count))
    for domain in (Int(int=(low, low + count - 1)), Choice(choice=values)):
        assert domain.value_at(share) in values
        assert domain.grid() == values
        assert [domain.value_at(domain.share_of(end)) for end in (values[0], values[-1])] == [
            values[0],
            values[-1],
        ]


@given(seed=st.integers(0, 1000))
def test_a_key_has_a_value_where_its_condition_holds_and_nowhere_else(seed: int) -> None:
    rng = random.Random(seed)
    point = draw(SPACE, lambda _, domain: domain.value_at(rng.random()))
    assert ("optimizer.trust_max" in point) == (point["optimizer.name"] == "lamb")


def test_a_grid_has_every_combination_that_can_be_once() -> None:
    points = list(grid_points(SPACE))
    assert len(points) == 3 * 1 + 3 * 2
    assert len({tuple(sorted(point.items())) for point in points}) == len(points)
    rates = sorted({float(str(point["optimizer.lr"])) for point in points})
    assert rates == pytest.approx([1e-4, 1e-3, 1e-2])
    assert all(("optimizer.trust_max" in p) == (p["optimizer.name"] == "lamb") for p in points)


def test_a_domain_is_of_one_kind() -> None:
    with pytest.raises(ValidationError, match=r"expected one of uniform.*'choice'"):
        TypeAdapter(Domain).validate_python({"choise": [1, 2]})
    with pytest.raises(ValidationError, match="expected one of"):
        TypeAdapter(Domain).validate_python({"uniform": [0, 1], "int": [0, 1]})


@given(factor=st.floats(0.1, 10))
def test_a_perturbed_point_stays_in_its_space(factor: float) -> None:
    point = clip_to_domains(SPACE, {"optimizer.lr": 1e-2 * factor, "optimizer.name": "lamb"})
    assert 1e-4 <= point["optimizer.lr"] <= 1e-2  # type: ignore[operator]
    assert point["optimizer.name"] == "lamb"


def test_the_first_rung_leaves_three_more() -> None:
    assert first_rung(AshaConfig(name="asha", reduction_factor=3), 27_000) == 1000
    assert first_rung(AshaConfig(name="asha", grace_tokens=5), 27_000) == 5
