"""Balance under the deal and under other schemes, at many world sizes.

    python benchmarks/schemes.py ../shared/data/wikipedia_lengths_512.json

Batches of 16 samples a worker are drawn from the histogram of Wikipedia's lengths; all schemes
share the same ones. Work of a row of s tokens: 24 h^2 s + 4 h s^2 with h = 1024; micro-batches of
at most 8,192 tokens, nodes of 8. Arithmetic only: the figures do not depend on the machine.
Writes benchmarks/results/schemes.json and schemes.png.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from harness import RESULTS, parser_of, write_result

from elastrata.bench.samples import read_histogram
from elastrata.cli.inspect import SCHEMES
from elastrata.tracking.plots import imbalance_curves
from elastrata_pipelines.balance import drawn_batches
from elastrata_pipelines.comparison import compare
from elastrata_pipelines.deal import WorkModel

WORKERS = (2, 3, 8, 13, 31, 64, 127, 256, 509, 777, 1024)
SAMPLES_EACH = 16
STEPS = 20
HIDDEN = 1024
WORK = WorkModel(linear=24 * HIDDEN**2, quadratic=4 * HIDDEN)


def measure(histogram: Sequence[int], workers: int) -> list[dict[str, Any]]:
    found = compare(
        drawn_batches(histogram, batch_size=SAMPLES_EACH * workers, steps=STEPS),
        workers=workers,
        tokens_per_micro_batch=8192,
        work=WORK,
        seq_len=512,
        ranks_per_node=8,
    )
    return [
        {
            key: round(value, 5) if isinstance(value, float) else value
            for key, value in asdict(scheme).items()
        }
        for scheme in found
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("histogram", help="wikipedia_lengths_512.json")
    histogram = read_histogram(parser.parse_args().histogram)
    by_workers = {workers: measure(histogram, workers) for workers in WORKERS}
    curves: dict[str, dict[int, float]] = {name: {} for name in SCHEMES.values()}
    for workers, schemes in by_workers.items():
        for scheme in schemes:
            curves[SCHEMES[scheme["scheme"]]][workers] = scheme["imbalance_max_over_mean"]
    imbalance_curves(curves, RESULTS / "schemes.png")
    rows = [{"workers": workers, "schemes": found} for workers, found in by_workers.items()]
    write_result("schemes", {"steps": STEPS, "work": asdict(WORK), "rows": rows}, ("numpy",))


if __name__ == "__main__":
    main()
