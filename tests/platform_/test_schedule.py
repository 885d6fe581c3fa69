"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from elastrata.step.schedule import DecayConfig, ScheduleConfig, learning_rate


def decay_starts(shape: str) -> st.SearchStrategy[str]:
    return st.sampled_from(["warmup_end"] if shape == "wsd" else ["warmup_end", "first_step"])


def decays(most: int) -> st.SearchStrategy[DecayConfig]:
    shapes = st.sampled_from(["linear", "cosine", "1-sqrt"])
    return st.builds(DecayConfig, shape=shapes, steps=st.integers(1, most)) | st.builds(
        DecayConfig, shape=shapes, ratio=st.floats(0.001, 1)
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[ScheduleConfig, int]:
    steps = draw(st.integers(1, 300))
    warmup = draw(st.integers(0, steps - 1))
    shape = draw(st.sampled_from(["linear", "cosine", "constant", "polynomial", "wsd"]))
    config = ScheduleConfig(
        shape=shape,
        power=draw(st.floats(0.1, 4)) if shape == "polynomial" else 1.0,
        warmup_steps=warmup,
        warmup_offset=draw(st.integers(0, max(0, warmup - 1))),
        decay_from=draw(decay_starts(shape)),
        decay=draw(decays(steps - warmup)) if shape == "wsd" else DecayConfig(),
        final=draw(st.floats(0, 1)),
    )
    return config, steps


def rates(config: ScheduleConfig, steps: int, peak: float = 1.0) -> list[float]:
    return [learning_rate(config, peak=peak, step=step, steps=steps) for step in range(steps)]


@given(runs())
def test_it_rises_and_then_falls_and_stays_between_final_and_peak(run) -> None:
    config, steps = run
    found, warmup = rates(config, steps), config.warmup_steps - config.warmup_offset
    assert max(found) <= 1 + 1e-12
    assert found[:warmup] == sorted(found[:warmup])
    falling = found[warmup:]
    assert all(later <= rate + 1e-12 for rate, later in pairwise(falling))
    assert all(rate >= config.final - 1e-12 for rate in falling)


@given(runs())
def test_no_step_is_wasted_at_rate_zero_before_the_last(run) -> None:
    assert all(rate > 0 for rate in rates(*run))


def test_warm_up_by_hand() -> None:
    assert rates(ScheduleConfig(warmup_steps=3), 7) == [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25]
    offset = ScheduleConfig(warmup_steps=3, warmup_offset=1)
    assert rates(offset, 6) == [0.5, 0.75, 1.0, 0.75, 0.5, 0.25]


def test_mlperfs_decay_counts_all_steps() -> None:
    config = ScheduleConfig(shape="polynomial", power=0.5, warmup_steps=2, decay_from="first_step")
    found = rates(config, 8, peak=2.0)
    assert found[:2] == pytest.approx([2 / 3, 4 / 3])
    assert found[2:] == pytest.approx([2 * (1 - step / 8) ** 0.5 for step in range(2, 8)])


@pytest.mark.parametrize(
    ("shape", "falling"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("1-sqrt", [1.0, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5]),
        ("cosine", [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
    ],
)
def test_wsd_by_hand(shape: str, falling: list[float]) -> None:
    for length in ({"steps": 4}, {"ratio": 0.5}):
        config = ScheduleConfig(shape="wsd", warmup_steps=1, decay={"shape": shape, **length})
        assert rates(config, 8) == pytest.approx([0.5, 1.0, 1.0, 1.0, *falling])


def test_runs_of_all_lengths_share_the_rates_before_their_decays() -> None:
    config = ScheduleConfig(shape="wsd", warmup_steps=5)
    short, long = rates(config, 50), rates(config, 100)
    assert short[:41] == long[:41]
    assert (config.decay_start(50), config.decay_start(100)) == (40, 80)
    assert short[41] < long[41] == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"power": 2},
        {"shape": "polynomial", "power": 0},
        {"warmup_steps": 3, "warmup_offset": 3},
        {"warmup_offset": 1},
        {"warmup_steps": -1},
        {"final": 1.1},
        {"decay_from": "start"},
        {"decay": {"steps": 5}},
        {"shape": "wsd", "decay_from": "first_step"},
        {"shape": "wsd", "decay": {"steps": 5, "ratio": 0.1}},
        {"shape": "wsd", "decay": {"ratio": 0}},
        {"shape": "wsd", "decay": {"shape": "sqrt"}},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ScheduleConfig.model_validate(wrong)
