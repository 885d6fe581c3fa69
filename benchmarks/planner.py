"""The planner's forecasts compared with published figures (Megatron-LM, arXiv 2311.05610).

    PYTHONPATH=tests python benchmarks/planner.py benchmarks/published

The folder contains `megatron_sc21_table1.csv` and `megatron_sc21_vs_zero3.csv` (arXiv 2104.04473).
Two constants, the shares of peak FLOPs and of memory bandwidth that kernels reach, are fitted on
four rows of table 1. All other constants are from data sheets and papers. The fit is repeated on
all sets of four of the ten rows. Also measures the search over all layouts of 175 billion
parameters on 1,024 GPUs. Writes results/planner.json and results/planner.png.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import RESULTS, parser_of, picture, write_result

from elastrata.planner.cluster import read_cluster
from elastrata.planner.devices import GPU, Efficiency
from elastrata.planner.operations import Machine
from elastrata.planner.plan import search
from elastrata.planner.stack import engine_stack
from support.published import (
    DEVICE,
    FITTED_ROWS,
    Compared,
    Row,
    Setting,
    fit,
    gpt,
    rows,
    settings,
    table1_errors,
    table1_time,
    table2,
)

# The fitted rows, shifted by 0 to 9 rows.
ROTATIONS = [tuple(sorted((row + turn) % 10 for row in FITTED_ROWS)) for turn in range(10)]


def _errors(errors: Sequence[float]) -> dict[str, float]:
    absolute = [abs(error) for error in errors]
    return {"mean": round(statistics.mean(absolute), 4), "worst": round(max(absolute), 4)}


def of_fit(table: Sequence[Row], chosen: Sequence[int]) -> dict[str, Any]:
    """Return the errors with constants fitted on the chosen rows."""
    efficiency = fit([table[row] for row in chosen])
    errors = table1_errors(table, efficiency)
    other_errors = [error for row, error in enumerate(errors) if row not in chosen]
    return {
        "rows": [row + 1 for row in chosen],
        "matmul": round(efficiency.matmul, 4),
        "memory": round(efficiency.memory, 4),
        "fitted": _errors([errors[row] for row in chosen]),
        "others": _errors(other_errors),
        "all": _errors(errors),
    }


def table1(table: Sequence[Row], efficiency: Efficiency) -> dict[str, Any]:
    # All 210 fits, to show that the result does not depend on the choice of the rows.
    all_fits = [of_fit(table, chosen) for chosen in itertools.combinations(range(len(table)), 4)]
    within = [one for one in all_fits if one["all"]["mean"] <= 0.03 and one["all"]["worst"] <= 0.06]
    rows_found = []
    for row in table:
        tflops, step = table1_time(row, efficiency)
        rows_found.append(
            {
                "params_billion": row["params_billion"],
                "published": row["tflops_per_gpu"],
                "predicted": round(tflops, 1),
                "error": round(tflops / row["tflops_per_gpu"] - 1, 4),
                "seconds": {key: round(value, 4) for key, value in asdict(step).items()},
            }
        )
    # A trivial predictor, to compare with.
    constant = statistics.mean(row["tflops_per_gpu"] for row in table)
    return {
        "rows": rows_found,
        "fit": of_fit(table, FITTED_ROWS),
        "with_the_shipped_constants": _errors(table1_errors(table, efficiency)),
        "a_constant_for_every_row": _errors(
            [constant / row["tflops_per_gpu"] - 1 for row in table]
        ),
        "rotated": [of_fit(table, chosen) for chosen in ROTATIONS],
        "every_four_rows": {
            "fits": len(all_fits),
            "median_of_means": statistics.median(one["all"]["mean"] for one in all_fits),
            "largest_mean": max(one["all"]["mean"] for one in all_fits),
            "largest_worst": max(one["all"]["worst"] for one in all_fits),
            "share_within_3_and_6_percent": round(len(within) / len(all_fits), 3),
        },
    }


def of_setting(one: Setting) -> dict[str, Any]:
    winner = one.winner
    best = sorted((run for run in one.runs if run.fits), key=lambda run: -run.mfu)[:3]
    return {
        "params_billion": one.params_billion,
        "sequence": one.sequence,
        "gpus": one.gpus,
        "runs": len(one.runs),
        "winner": str(winner.layout),
        "published_mfu": winner.published,
        "predicted_mfu": round(winner.mfu, 1),
        "error": round(one.error, 3),
        "rank": one.rank,
        "best_predicted": [str(run.layout) for run in best],
        "fit_told_right": sum(run.fits == run.fitted for run in one.runs),
        "predicted_to_fit_ran_out": sum(run.fits and not run.fitted for run in one.runs),
        "predicted_too_large_ran": sum(run.fitted and not run.fits for run in one.runs),
    }


def search_seconds() -> dict[str, Any]:
    model, cluster = gpt(96, 12288, 96), read_cluster(f"1024x{DEVICE.name}")
    machine = Machine(DEVICE, GPU, engine_stack("bf16", "fp32"))
    start_time = time.perf_counter()
    # Tensor parallelism stays within a node of 8 GPUs.
    result = search(model, cluster, machine, batch_size=1536, steps=1, tensor_sizes=(1, 2, 4, 8))
    seconds = time.perf_counter() - start_time
    return {
        "seconds": round(seconds, 2),
        "layouts": len(result.forecasts),
        "do_not_fit": result.too_large,
        "best": str(result.forecasts[0].layout),
    }


def draw(table: dict[str, Any], compared: Sequence[Compared], llamas: Sequence[Setting]) -> None:
    figure = picture(12, 4.2)
    one, two, three = figure.subplots(1, 3)
    published = [row["published"] for row in table["rows"]]
    sizes = [f"{row['params_billion']:g}" for row in table["rows"]]
    one.plot(sizes, published, "o", color="#1f2933", label="published")
    one.plot(sizes, [row["predicted"] for row in table["rows"]], "x-", color="#d1495b",
             label="predicted")  # fmt: skip
    one.set(title="Megatron-LM, table 1", xlabel="billion parameters", ylabel="TFLOP/s a GPU")
    one.set_ylim(0, 190)
    one.tick_params(axis="x", rotation=45)
    for size, color in ((174.6, "#1769aa"), (529.6, "#2a9d8f")):
        some = [row for row in compared if row.params_billion == size]
        gpus = [row.gpus for row in some]
        for kind, line in (("ptdp", "-"), ("zero3", ":")):
            two.plot(gpus, [getattr(row, kind) for row in some], line, color=color,
                     label=f"{kind} {size:g}")  # fmt: skip
            two.plot(gpus, [getattr(row, f"{kind}_published") for row in some], "o", color=color)
    two.set(title="PTD-P and ZeRO-3 (dots: published)", xlabel="GPUs", ylabel="TFLOP/s a GPU")
    runs = [run for setting in llamas for run in setting.runs if run.fitted]
    three.scatter([r.published for r in runs], [r.mfu for r in runs], s=8, color="#7b8794")
    three.scatter([s.winner.published for s in llamas], [s.winner.mfu for s in llamas], s=30,
                  color="#d1495b", label="winners")  # fmt: skip
    # Perfect predictions are on this diagonal.
    three.plot([20, 75], [20, 75], color="#1f2933", linewidth=1)
    three.set(title="arXiv 2311.05610, MFU in %", xlabel="published", ylabel="predicted")
    for axes in (one, two, three):
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "planner.png")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path, help="folder with Megatron-LM's tables")
    data: Path = parser.parse_args().data
    table = table1(rows(data / "megatron_sc21_table1.csv"), GPU)
    compared = table2(data / "megatron_sc21_vs_zero3.csv", GPU)
    llamas = settings(GPU)
    good = [s for s in llamas if s.rank and s.rank <= 3 and abs(s.error) <= 0.1]
    figures = {
        "table1": table,
        "table2": [
            {key: round(value, 3) for key, value in asdict(row).items()} for row in compared
        ],
        "layouts_2311_05610": {
            "settings": [of_setting(one) for one in llamas],
            "winner_in_best_three_and_mfu_within_10_percent": len(good),
        },
        "search_175b_on_1024": search_seconds(),
    }
    write_result("planner", figures, ("numpy",))
    draw(table, compared, llamas)


if __name__ == "__main__":
    main()
