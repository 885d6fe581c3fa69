"""`bench step`: the engine's own step, measured, with figures that agree among themselves."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastrata.bench.samples import RandomSteps, bench_samples, choose_lengths, read_histogram
from elastrata.bench.step import StepFigures, measure_steps
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.deal import WorkModel, deal
from elastrata_pipelines.errors import UserError
from support.bare_loop import train_on_ranks
from support.ranks import run_ranks
from support.synthetic import SEQ_LEN, tiny_recipe, write_data_set

WARM_UP, STEPS = 1, 3
PEAK = 1e12


@pytest.fixture(autouse=True)
def keep_process() -> Iterator[None]:
    """What measuring changes of the process it runs in."""
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data_set(folder, samples=150)
    return folder


def recipe_of(data: Path, **changes: Any) -> dict[str, Any]:
    return tiny_recipe(data, data / "runs", steps=WARM_UP + STEPS, **changes)


def measured(recipe: dict[str, Any], lengths: str | None = None) -> StepFigures:
    checked = Recipe.model_validate(recipe)
    samples = bench_samples(checked, lengths, steps=WARM_UP + STEPS)
    return measure_steps(checked, samples, warm_up=WARM_UP)


@pytest.mark.parametrize(
    "changes", [{}, {"clip": {"method": "bucketwise"}}], ids=["plain", "bucketwise"]
)
def test_it_trains_as_a_worker_does(changes: dict[str, Any], data: Path) -> None:
    recipe = recipe_of(data, **changes)
    trained = run_ranks(1, train_on_ranks, recipe)[0]
    assert measured(recipe).loss == pytest.approx(trained[-1].loss, rel=1e-6)


def test_the_figures_agree(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastrata.bench.step.peak_flops", lambda device: PEAK)
    found = measured(recipe_of(data), "full")
    # samples of one length, an odd number of steps: all medians are those of the same step
    for rate, amount in [
        (found.sequences_per_second, 21),
        (found.tokens_per_second, 21 * SEQ_LEN),
        (found.positions_per_second, 21 * SEQ_LEN),
    ]:
        assert rate.median == pytest.approx(amount / found.seconds.median)
        assert rate.lower <= rate.median <= rate.upper
    assert found.tokens_per_second.median == pytest.approx(
        SEQ_LEN * found.sequences_per_second.median
    )
    assert found.mfu is not None
    assert found.mfu.median == pytest.approx(
        found.flops_per_token * found.tokens_per_second.median / PEAK,
        rel=0.02,  # special ids among the random ones are not predicted
    )
    assert (found.padding, found.batch_size, found.peak_flops) == (0.0, 21, PEAK)
    assert found.micro_batches == -(-21 // (128 // SEQ_LEN))
    assert set(found.seconds_by_phase) == {"collating", "forward_backward", "clip_optimizer"}
    assert all(phase.lower > 0 for phase in found.seconds_by_phase.values())


@pytest.mark.parametrize(("virtual_ranks", "pairs"), [(1, False), (3, True)])
def test_random_steps_are_dealt_and_cut_as_the_pipeline_does(virtual_ranks, pairs) -> None:
    histogram = (0, 0, 0, 5, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 2)
    work = WorkModel(linear=7, quadratic=1)
    random = RandomSteps(
        histogram=histogram,
        num_ids=50,
        pairs=pairs,
        steps=4,
        batch_size=29,
        work=work,
        tokens_per_micro_batch=40,
        virtual_ranks=virtual_ranks,
        seed=1,
    )
    steps = list(random)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    for step, again in zip(steps, random, strict=True):
        lengths = step.rows.lengths
        assert np.array_equal(step.rows.tokens, again.rows.tokens)
        assert set(lengths.tolist()) <= {3, 9, 16}
        assert len(step.rows) == 29
        assert step.rows.tokens.max() < 50
        assert (step.rows.is_next is not None) == pairs
        assert step.rounds == virtual_ranks
        assert all(len(rows.tokens) <= 40 for rows in step.micro_batches)
        parts = deal(lengths, num_ranks=virtual_ranks, work=work, tokens_per_micro_batch=40)
        assert len(step.cuts) - 1 == virtual_ranks * (len(parts.hands[0].cuts) - 1)
    ids = np.concatenate([step.rows.sample_ids for step in steps])
    assert len(np.unique(ids)) == 4 * 29


def test_what_does_not_fit_is_told_at_once(data: Path) -> None:
    recipe = Recipe.model_validate(
        recipe_of(
            data,
            micro_batch_tokens=40,
            workload={**tiny_recipe("", "")["workload"], "max_positions": 32},
        )
    )
    with pytest.raises(UserError) as caught:
        bench_samples(recipe, "full", steps=1)
    assert caught.value.problems == (
        "workload.max_positions: 32, but this data set has samples of up to 48 tokens",
        "micro_batch_tokens: 40: --lengths full has samples of 48 tokens; expected at least that",
    )


@pytest.mark.parametrize(
    ("content", "histogram"),
    [
        ({"counts": [0, 4, 1, 0]}, (0, 0, 4, 1)),
        ({"source": "mine", "counts": [7]}, (0, 7)),
        ({"length_histogram": [0, 4, 1]}, (0, 4, 1)),
    ],
)
def test_files_of_both_forms(content, histogram, tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert read_histogram(str(path)) == histogram
    chosen = choose_lengths(str(path), seq_len=9, prepared=True)
    assert (chosen.name, chosen.histogram) == ("lengths.json", histogram)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not valid JSON"),
        ('{"count": [1]}', "expected an object with a list 'counts'"),
        ('{"counts": 3}', "counts: expected a list of numbers of samples"),
        ('{"counts": [1, -2]}', "counts: -2 samples of length 2: expected whole numbers"),
        ('{"counts": []}', "counts: expected at least one sample, and none of length 0"),
        ('{"length_histogram": [3, 1]}', "expected at least one sample, and none of length 0"),
    ],
)
def test_a_bad_histogram_is_told_in_one_line(content, problem, tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_histogram(str(path))
    (line,) = caught.value.problems
    assert line.startswith(f"--lengths: {path}: ")
    assert problem in line


def test_a_name_that_is_none_gets_a_hint() -> None:
    with pytest.raises(UserError, match=r"ful: expected data, full or a JSON file \(did you mean"):
        choose_lengths("ful", seq_len=9, prepared=True)
