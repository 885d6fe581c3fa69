"""What is made ready ahead: the same run, and nothing of a step that is not trained."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastrata.step.prefetch import (
    Background,
    BackgroundThread,
    Prefetch,
    ReadyStep,
    SynchronousBackground,
)
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.rows import Rows
from support.ahead_ranks import choose_ahead, train_ahead
from support.bare_loop import train_automatically
from support.poison import train_poisoned
from support.ranks import run_ranks
from support.synthetic import tiny_recipe, write_data_set

CPU = torch.device("cpu")
STEPS = 8
NO_ROWS = Rows(
    sample_ids=np.empty(0, np.uint64),
    epochs=np.empty(0, np.int64),
    lengths=np.empty(0, np.int64),
    tokens=np.empty(0, np.uint16),
)


class Source:
    """Steps, of which some cannot be collated; knows which were read and prepared."""

    def __init__(self, *, bad: int = 0, fails_at: int = 0) -> None:
        self.bad, self.fails_at = bad, fails_at
        self.read: list[int] = []
        self.prepared: list[int] = []

    def __iter__(self) -> Iterator[RankStep]:
        for number in range(1, 6):
            if number == self.fails_at:
                raise OSError("shard")
            self.read.append(number)
            yield RankStep(step=number, rows=NO_ROWS, cuts=np.zeros(1, np.int64), imbalance=1.0)

    def prepare(self, rank_step: RankStep) -> ReadyStep:
        if rank_step.step == self.bad:
            raise ValueError("tokens")
        self.prepared.append(rank_step.step)
        return ReadyStep(batches=[], sums={"step": rank_step.step})


def steps_of(source: Source, background: Background | None, known: bool = True) -> Prefetch:
    return Prefetch(source, source.prepare, lambda part: part if known else None, background)


def test_one_step_is_made_ready_ahead_and_no_more() -> None:
    source = Source()
    with steps_of(source, SynchronousBackground()) as steps:
        for number, rank_step in zip(range(1, 4), steps, strict=False):
            assert rank_step.step == number
            assert source.read == source.prepared == list(range(1, number + 2))
            assert steps.ready(rank_step).sums == {"step": number}
            assert steps.next_ready is not None
            assert steps.next_ready.sums == {"step": number + 1}


def test_on_a_cpu_nothing_is_done_before_it_is_asked_for() -> None:
    source = Source()
    with steps_of(source, None) as steps:
        first = next(steps)
        assert (source.read, source.prepared, steps.next_ready) == ([1], [], None)
        steps.ready(first)
        assert (source.read, source.prepared) == ([1], [1])


def test_a_step_that_may_be_cut_otherwise_is_only_read() -> None:
    source = Source()
    with steps_of(source, SynchronousBackground(), known=False) as steps:
        first = next(steps)
        assert (source.read, source.prepared, steps.next_ready) == ([1, 2], [], None)
        steps.ready(first)
        assert source.prepared == [1]


@pytest.mark.parametrize(
    "kind", [SynchronousBackground, lambda: BackgroundThread(CPU)], ids=["once", "thread"]
)
def test_what_goes_wrong_ahead_is_raised_in_the_step_that_needs_it(kind: Any) -> None:
    with steps_of(Source(bad=2), kind()) as steps:
        steps.ready(next(steps))
        second = next(steps)
        with pytest.raises(ValueError, match="tokens"):
            steps.ready(second)
        assert steps.ready(next(steps)).sums == {"step": 3}
    with steps_of(Source(fails_at=2), kind()) as steps:
        steps.ready(next(steps))
        with pytest.raises(OSError, match="shard"):
            next(steps)


def test_the_thread_ends_with_the_attempt() -> None:
    before = set(threading.enumerate())
    with steps_of(Source(), BackgroundThread(CPU)) as steps:
        next(steps)
        started = set(threading.enumerate()) - before
        (thread,) = (thread for thread in started if thread.name == "elastrata background")
        assert thread.daemon
    thread.join(300)  # `close` itself does not wait that long
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("data")
    write_data_set(folder, samples=150)
    return tiny_recipe(folder, folder / "runs", steps=STEPS, on_nonfinite="skip")


def test_the_run_is_the_same_to_the_bit(recipe: dict[str, Any]) -> None:
    """With steps that are left out, and groups of steps that end while one is made ready."""
    plain = run_ranks(2, train_poisoned, recipe)
    for (records, _, threads), expected in zip(
        run_ranks(2, train_ahead, recipe, (3, 4)), plain, strict=True
    ):
        assert [r.digest for r in records] == [r.digest for r in expected]
        assert [(r.samples, r.tokens, r.skipped) for r in records] == [
            (r.samples, r.tokens, r.skipped) for r in expected
        ]
        assert any(r.skipped for r in records)
        assert _numbers(records) == _numbers(expected)
        assert threads == 0


def test_choices_are_made_as_ever(recipe: dict[str, Any]) -> None:
    open_recipe = {**recipe, "micro_batch_tokens": "auto", "steps": 12}
    (records, chosen, _) = run_ranks(1, choose_ahead, open_recipe)[0]
    expected, expected_chosen, _ = run_ranks(1, train_automatically, open_recipe)[0]
    assert [event.micro_batch_tokens for event in chosen] == [
        event.micro_batch_tokens for event in expected_chosen
    ]
    assert _numbers(records) == _numbers(expected)


def _numbers(records: list[Any]) -> list[tuple[float, ...]]:
    return [
        tuple(0.0 if math.isnan(x) else x for x in (r.loss, r.gradient_norm, r.padding, r.flops))
        for r in records
    ]
