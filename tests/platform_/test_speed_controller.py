"""The controller of speeds: it follows ranks that become slower, and leaves noise alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from elastrata.core.paces import Paces
from elastrata.core.speed_controller import SpeedController
from elastrata_pipelines.speeds import FULL_SPEED, Speeds

AHEAD = 20
"""Steps that are read by the time other speeds are asked for."""


@dataclass
class Run:
    """Simulated steps of ranks, whose hands follow the controller."""

    num_ranks: int
    seed: int
    noise: float
    outliers: float = 0.0
    every: int = 2
    speeds: dict[int, Speeds] = field(default_factory=dict)
    """By the step since which they are dealt by, `AHEAD` after they were asked for."""
    imbalances: list[float] = field(default_factory=list)

    def steps(self, count: int, true: Callable[[int], np.ndarray]) -> Run:
        rng = np.random.default_rng(self.seed)
        paces, controller = Paces(self.num_ranks), SpeedController(self.num_ranks)
        dealt_by: Speeds = ()
        for step in range(1, count + 1):
            dealt_by = self.speeds.get(step, dealt_by)
            work = np.array(dealt_by or (FULL_SPEED,) * self.num_ranks, dtype=np.float64)
            exact = work / true(step)
            self.imbalances.append(float(exact.max() / exact.mean()))
            seconds = exact * np.exp(self.noise * rng.standard_normal(self.num_ranks))
            seconds *= np.where(rng.random(self.num_ranks) < self.outliers, 10, 1)
            paces.add(step, seconds, work)
            if step % self.every == 0:
                wanted = controller.decide(step, dealt_by, paces.estimate())
                if wanted:
                    self.speeds[step + AHEAD] = wanted
        return self


SEEDS = [range(15), pytest.param(range(1000), marks=pytest.mark.matrix)]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
def test_noise_of_a_tenth_moves_no_hand(num_ranks: int, seeds: range) -> None:
    for seed in seeds:
        run = Run(num_ranks, seed, noise=0.1).steps(150, lambda _: np.ones(num_ranks))
        assert run.speeds == {}, seed


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
def test_a_rank_that_becomes_slow_is_followed_there_and_back_without_oscillation(
    seeds: range,
) -> None:
    """Throttled at step 80 and freed at step 200, with noise of a tenth: each change is answered
    once, or a second time by a few percent; never the other way round. It takes up to 40 steps, and
    up to 55 where a correction of a few percent is on its way at that moment."""

    def true(step: int) -> np.ndarray:
        return np.array([1.0, 0.5 if 80 <= step < 200 else 1.0, 1.0])

    for seed in seeds:
        run = Run(3, seed, noise=0.1).steps(320, true)
        assert min(run.speeds) > 80, seed
        # What is asked for within four steps knows nothing of the change yet.
        slowed = [s for s in run.speeds if s - AHEAD < 204]
        freed = [s for s in run.speeds if s - AHEAD >= 204]
        on_its_way = max(slowed) > 200
        assert min(slowed) <= 80 + 40, seed
        assert min(freed) <= 200 + (55 if on_its_way else 40), seed
        assert max(len(slowed), len(freed)) <= 2, seed
        assert all(run.speeds[s][1] < 0.7 * FULL_SPEED for s in slowed), seed
        assert all(run.speeds[s][1] > 0.82 * FULL_SPEED for s in freed), seed


@pytest.mark.parametrize("true", [(1, 0.5), (1, 0.8, 0.5, 0.25)])
def test_ranks_of_several_speeds_are_balanced_soon(true: tuple[float, ...]) -> None:
    run = Run(len(true), 0, noise=0.02).steps(100, lambda _: np.array(true))
    assert min(run.speeds) <= 40
    assert run.imbalances[60] <= 1.05


def test_outliers_do_not_count() -> None:
    for seed in range(20):
        run = Run(4, seed, noise=0.02, outliers=0.05).steps(150, lambda _: np.ones(4))
        assert run.speeds == {}, seed


def test_1024_ranks_of_four_kinds_are_balanced_and_left_alone() -> None:
    true = np.repeat([1.0, 0.8, 0.5, 0.25], 256)
    run = Run(1024, 0, noise=0.03, every=8).steps(160, lambda _: true)
    assert len(run.speeds) <= 3
    assert run.imbalances[-1] <= 1.05


def test_a_rank_without_rows_keeps_its_speed() -> None:
    paces, controller = Paces(3), SpeedController(3)
    dealt_by = (256, 128, 1)
    for step in range(1, 13):
        paces.add(step, np.array([1.0, 0.5, 0.01]), np.array([256.0, 128.0, 0.0]))
    wanted = controller.decide(12, dealt_by, paces.estimate())
    assert wanted == (256, 256, 1)
