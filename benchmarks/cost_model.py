"""The deal's cost model held against measured times of micro-batches.

    python benchmarks/cost_model.py [RECIPE]...

The deal takes a sample of s tokens to cost a s + b s^2, and with windows c p(s) beside it, p being
the pairs of tokens within one; a, b and c are counted from the shapes of the model's matrices. Here
micro-batches of many shapes go forward and backward through a model, turn by turn, in random order,
on one thread; the median CPU time of each counts. Fits by least squares of relative errors, each
with a constant for what every micro-batch costs whatever is in it:

- `model`: constant + scale * work, the work being what the deal takes it to be; its errors say how
  well the deal knows times. `tokens_only` is the same with the number of tokens for the work,
  `without_windows` with work as if all layers attended to all tokens.
- `free`: constant + a * tokens + b * squares, with windows constant + a * (all but squares) + b *
  squares; `ratio` is b / a as measured over b / a as counted.

Ranks run equally many micro-batches, so that the constant is the same for all.
Writes benchmarks/results/cost_model.json; recipes that are not named stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from harness import cpu_milliseconds, known_result, parser_of, write_result

from elastrata.recipe.file import load_recipe
from elastrata_pipelines.deal import pairs_within
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_workloads.unpadded.masked_lm import MaskedTransformer

Floats = npt.NDArray[np.float64]

RECIPES = ("bert/small", "bert/mini", "modernbert/mini")
SHAPES = (
    *((16, 32), (4, 128), (1, 512)),
    *((32, 32), (16, 64), (8, 128), (4, 256), (2, 512)),
    *((64, 32), (16, 128), (8, 256), (4, 512)),
)
"""Rows and length of even micro-batches: 512, 1,024 and 2,048 tokens."""
LONG_SHAPES = ((1, 1024), (2, 1024))
"""More of them, of models that take such samples."""
UNEVEN_ROWS = (4, 8)
ROUNDS = 5
VOCABULARY = Vocabulary(
    size=30522, pad_id=0, mask_id=103, special_ids=(0, 100, 101, 102, 103), continuation_ids=()
)


def micro_batches(longest: int) -> dict[str, list[int]]:
    """Lengths of the rows of each micro-batch, longest first."""
    shapes = [shape for shape in (*SHAPES, *LONG_SHAPES) if shape[1] <= longest]
    even = {f"{rows} x {length}": [length] * rows for rows, length in shapes}
    rng = np.random.default_rng(0)
    uneven = {
        f"{rows} of 16 to {longest}": sorted(
            rng.integers(16, longest + 1, rows).tolist(), reverse=True
        )
        for rows in UNEVEN_ROWS
    }
    return even | uneven


def rows_of(lengths: Sequence[int]) -> Rows:
    rng = np.random.default_rng(0)
    return Rows(
        sample_ids=np.arange(len(lengths), dtype=np.uint64),
        epochs=np.zeros(len(lengths), np.int64),
        lengths=np.array(lengths),
        tokens=rng.integers(1000, VOCABULARY.size, sum(lengths)).astype(np.uint16),
    )


def measure(
    workload: MaskedTransformer, cases: dict[str, list[int]], rounds: int
) -> dict[str, float]:
    """Milliseconds of forward and backward of each micro-batch."""
    torch.manual_seed(0)
    model = workload.build_model(VOCABULARY, workload.longest)

    def step(lengths: Sequence[int]) -> Callable[[], None]:
        batch = workload.collate(rows_of(lengths), VOCABULARY, seed=0)

        def run() -> None:
            model.zero_grad()
            workload.loss(model, batch).terms["mlm"].backward()

        return run

    return cpu_milliseconds({name: step(lengths) for name, lengths in cases.items()}, rounds)


def pairs_in(cases: Iterable[Sequence[int]], window: int) -> Floats:
    """Pairs of tokens within a window, of each micro-batch."""
    return np.array([float(pairs_within(np.array(case), window).sum()) for case in cases])


def fit(columns: Sequence[Floats], times: Floats) -> tuple[Floats, Floats]:
    """Factors of a constant and the columns, and the times they give."""
    matrix = np.stack([np.ones_like(times), *columns], axis=1)
    factors = np.linalg.lstsq(matrix / times[:, None], np.ones_like(times), rcond=None)[0]
    return factors, matrix @ factors


def quality(predicted: Floats, times: Floats) -> dict[str, float]:
    errors = np.abs(predicted / times - 1)
    spread = ((times - times.mean()) ** 2).sum()
    return {
        "r_squared": round(float(1 - ((times - predicted) ** 2).sum() / spread), 5),
        "median_relative_error": round(float(np.median(errors)), 4),
        "largest_relative_error": round(float(errors.max()), 4),
    }


def check(recipe: str, rounds: int) -> dict[str, Any]:
    """Measured times of one model beside those the cost model gives."""
    workload = load_recipe(recipe).workload
    assert isinstance(workload, MaskedTransformer)
    cases = micro_batches(workload.longest)
    measured = measure(workload, cases, rounds)
    work = workload.work(VOCABULARY)
    everywhere = replace(work, quadratic=work.quadratic + work.windowed, windowed=0)
    times = np.array(list(measured.values()))
    works, global_works = (
        np.array([float(of(lengths).sum()) for lengths in cases.values()])
        for of in (work, everywhere)
    )
    tokens = np.array([float(sum(lengths)) for lengths in cases.values()])
    squares = np.array([float(sum(s * s for s in lengths)) for lengths in cases.values()])
    others = tokens + work.windowed / work.linear * pairs_in(cases.values(), work.window)
    _, by_model = fit([works], times)
    (constant, linear, quadratic), by_both = fit([others, squares], times)
    counted = work.quadratic / work.linear
    windows = {"without_windows": quality(fit([global_works], times)[1], times)}
    return {
        "recipe": recipe,
        "model": quality(by_model, times),
        "tokens_only": quality(fit([tokens], times)[1], times),
        **(windows if work.windowed else {}),
        "free": quality(by_both, times)
        | {
            "constant_milliseconds": round(float(constant), 2),
            "quadratic_over_linear_measured": float(f"{quadratic / linear:.4g}"),
            "quadratic_over_linear_counted": float(f"{counted:.4g}"),
            "ratio": round(float(quadratic / linear / counted), 3),
        },
        "micro_batches": [
            {"rows": name, "milliseconds": round(time_, 2), "by_model": round(float(guess), 2)}
            for (name, time_), guess in zip(measured.items(), by_model, strict=True)
        ],
    }


def main() -> None:
    parser = parser_of(__doc__, rounds=ROUNDS)
    parser.add_argument("recipes", nargs="*", default=RECIPES, metavar="RECIPE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = {one["recipe"]: one for one in known_result("cost_model").get("models", [])}
    for recipe in arguments.recipes:
        models[recipe] = {
            **check(recipe, arguments.rounds),
            "rounds": arguments.rounds,
        }
    figures = {
        "unit": "CPU time of forward and backward, one thread",
        "models": list(models.values()),
    }
    write_result("cost_model", figures, ("torch", "numpy"))


if __name__ == "__main__":
    main()
