"""Published throughput beside the planner's: Megatron-LM's tables and arXiv 2311.05610."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from elastrata.planner.cluster import read_cluster
from elastrata.planner.devices import DEVICES, GPU_PRIOR, Efficiency
from elastrata.planner.layout import Layout
from elastrata.planner.memory import memory
from elastrata.planner.operations import Machine
from elastrata.planner.stack import ALEPH_ALPHA_2023, MEGATRON_2021, ZERO3_2021, Stack
from elastrata.planner.step_time import StepTime, step_time
from elastrata.workload.model_spec import ModelSpec

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "benchmarks" / "published" / "layouts_2311_05610_runs.csv"
DEVICE = DEVICES["A100-80GB"]
FITTED_ROWS = (0, 3, 6, 8)
"""Of Megatron-LM's table 1, those that the planner's constants are fitted on."""
_PRIOR_WEIGHT = 0.3
"""Of a constant's distance from its prior, in logarithms, beside an error's: rows that tell the
constants apart badly leave them where they were."""
_SEQ_LEN, _VOCABULARY = 2048, 51_200
_TOKENS_A_STEP = 4_194_304
_LLAMA = {13: (40, 5120, 40, 13824), 30: (60, 6656, 52, 17920), 65: (80, 8192, 64, 22016)}
"""Layers, hidden size, heads, feed-forward size."""
_LLAMA_VOCABULARY = 128_000
"""What the published MFU and step times give, by the parameters they count: 14.0 billion of 13."""

Row = dict[str, float]


def rows(path: Path) -> list[Row]:
    """A table's rows; empty cells are NaN."""
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    return [
        {key: float(value) if value else float("nan") for key, value in row.items()}
        for row in csv.DictReader(lines)
    ]


def gpt(layers: int, hidden: int, heads: int) -> ModelSpec:
    """A model of Megatron-LM's tables."""
    return ModelSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        feed_forward=4 * hidden,
        gated=False,
        causal=True,
        vocabulary=_VOCABULARY,
        position_rows=_SEQ_LEN,
        tied=True,
        block_vectors=13 * hidden,
        seq_len=_SEQ_LEN,
    )


def _predicted(
    model: ModelSpec,
    gpus: int,
    efficiency: Efficiency,
    stack: Stack,
    layout: Layout,
    batch_size: int,
) -> StepTime:
    cluster = read_cluster(f"{gpus}x{DEVICE.name}")
    return step_time(model, cluster, Machine(DEVICE, efficiency, stack), layout, batch_size)


def _tflops(model: ModelSpec, gpus: int, batch_size: int, seconds: float) -> float:
    """As the paper counts, with recomputation: 96 B s l h^2 (1 + s / 6h + V / 16lh)."""
    s, layers, h = _SEQ_LEN, model.layers, model.hidden
    more = 1 + s / (6 * h) + _VOCABULARY / (16 * layers * h)
    return 96 * batch_size * s * layers * h * h * more / gpus / seconds / 1e12


def table1_time(row: Row, efficiency: Efficiency) -> tuple[float, StepTime]:
    """TFLOP/s of a GPU and the step, for a row of table 1."""
    model = gpt(int(row["layers"]), int(row["hidden"]), int(row["heads"]))
    gpus, batch_size = int(row["gpus"]), int(row["global_batch"])
    tensor, pipeline = int(row["tensor_parallel"]), int(row["pipeline_parallel"])
    parts = int(row["virtual_stages"])
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_stages=parts,
        schedule="interleaved_1f1b" if parts > 1 else "1f1b",
        copies=gpus // tensor // pipeline,
        micro_batch=int(row["micro_batch"]),
        checkpointing="full",
    )
    time = _predicted(model, gpus, efficiency, MEGATRON_2021, layout, batch_size)
    return _tflops(model, gpus, batch_size, time.total), time


def table1_errors(table: Sequence[Row], efficiency: Efficiency) -> list[float]:
    """Relative, of every row."""
    return [table1_time(row, efficiency)[0] / row["tflops_per_gpu"] - 1 for row in table]


def fit(table: Sequence[Row]) -> Efficiency:
    """The constants that these rows of table 1 give: least squares of relative errors, by
    Gauss-Newton, with a weak pull towards the prior."""
    names = ("matmul", "memory")
    prior = np.log([getattr(GPU_PRIOR, name) for name in names])

    def constants(at: np.ndarray) -> Efficiency:
        return replace(GPU_PRIOR, **{n: float(v) for n, v in zip(names, np.exp(at), strict=True)})

    def residuals(at: np.ndarray) -> np.ndarray:
        errors = np.log1p(table1_errors(table, constants(at)))
        return np.concatenate([errors, _PRIOR_WEIGHT * (at - prior)])

    at, step = prior.copy(), 1e-3
    for _ in range(8):
        now = residuals(at)
        slopes = np.array([(residuals(at + step * one) - now) / step for one in np.eye(len(at))]).T
        at = at + np.clip(np.linalg.solve(slopes.T @ slopes, -slopes.T @ now), -0.3, 0.3)
    return constants(at)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A row of table 2, in TFLOP/s of a GPU."""

    params_billion: float
    gpus: int
    ptdp: float
    ptdp_published: float
    zero3: float
    zero3_published: float
    zero3_waits: float
    """Share of the step in which ZeRO-3 waits for messages."""


def table2(path: Path, efficiency: Efficiency, zero3: Stack = ZERO3_2021) -> list[Compared]:
    """PTD-P and ZeRO-3. 96 and 280 model-parallel GPUs, 8 x 12 and 8 x 35, and micro-batches of one
    sample for PTD-P, of as many as the batch allows for ZeRO-3, are the paper's, as
    github.com/cli99/llm-analysis, examples/megatron-lm, has copied it; so is that ZeRO-3 had 640
    GPUs and 2,560 samples where PTD-P had 560 and 2,240, as 560 were too few for it. That stages
    are not interleaved is what the paper's figures tell, whose bubbles are (p - 1) / m."""
    found = []
    for row in rows(path):
        is_large = row["params_billion"] > 200
        model = gpt(105, 20480, 128) if is_large else gpt(96, 12288, 96)
        batch_size, stages = (2240, 35) if is_large else (1536, 12)
        gpus = int(row["gpus"])
        divided = Layout(
            tensor=8,
            pipeline=stages,
            copies=gpus // 8 // stages,
            checkpointing="full",
        )
        shards, shared = (640, 2560) if gpus == 560 else (gpus, batch_size)
        whole = Layout(shards=shards, micro_batch=shared // shards, checkpointing="full")
        a = _predicted(model, gpus, efficiency, MEGATRON_2021, divided, batch_size)
        b = _predicted(model, shards, efficiency, zero3, whole, shared)
        found.append(
            Compared(
                params_billion=row["params_billion"],
                gpus=gpus,
                ptdp=_tflops(model, gpus, batch_size, a.total),
                ptdp_published=row["ptdp_tflops_per_gpu"],
                zero3=_tflops(model, shards, shared, b.total),
                zero3_published=row["zero3_tflops_per_gpu"],
                zero3_waits=b.data_messages / b.total,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class LlamaRun:
    """One of the runs of arXiv 2311.05610."""

    layout: Layout
    published: float
    """MFU in percent; NaN: out of memory."""
    mfu: float
    """Predicted, percent, as the paper counts it."""
    needed: float
    """Predicted bytes."""

    @property
    def fitted(self) -> bool:
        """Whether it ran."""
        return self.published == self.published

    @property
    def fits(self) -> bool:
        """Whether it is predicted to."""
        return self.needed <= DEVICE.memory_bytes


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, a length and a number of GPUs, with all runs there were."""

    params_billion: int
    sequence: int
    gpus: int
    runs: tuple[LlamaRun, ...]

    @property
    def winner(self) -> LlamaRun:
        """The fastest there was."""
        return max((run for run in self.runs if run.fitted), key=lambda run: run.published)

    @property
    def rank(self) -> int | None:
        """Of the winner among those predicted to fit, by predicted MFU, from 1; None: it was not
        predicted to fit."""
        order = sorted((run for run in self.runs if run.fits), key=lambda run: -run.mfu)
        return order.index(self.winner) + 1 if self.winner in order else None

    @property
    def error(self) -> float:
        """Of the winner's MFU, relative."""
        return self.winner.mfu / self.winner.published - 1


def llama(billion: int, sequence: int) -> ModelSpec:
    """A model of arXiv 2311.05610."""
    layers, hidden, heads, feed_forward = _LLAMA[billion]
    return ModelSpec(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        feed_forward=feed_forward,
        gated=True,
        causal=True,
        vocabulary=_LLAMA_VOCABULARY,
        position_rows=0,
        tied=False,
        block_vectors=2 * hidden,
        seq_len=sequence,
    )


def settings(efficiency: Efficiency, path: Path = RUNS) -> list[Setting]:
    """The ten settings of arXiv 2311.05610."""
    grouped: dict[tuple[int, int, int], list[LlamaRun]] = {}
    for row in rows(path):
        key = (int(row["params_billion"]), int(row["sequence"]), int(row["gpus"]))
        grouped.setdefault(key, []).append(_llama_run(row, key, efficiency))
    return [
        Setting(params_billion=key[0], sequence=key[1], gpus=key[2], runs=tuple(runs))
        for key, runs in grouped.items()
    ]


def _llama_run(row: Row, key: tuple[int, int, int], efficiency: Efficiency) -> LlamaRun:
    billion, sequence, gpus = key
    model, batch_size = llama(billion, sequence), _TOKENS_A_STEP // sequence
    tensor, pipeline = int(row["tensor_parallel"]), int(row["pipeline_parallel"])
    layout = Layout(
        tensor=tensor,
        sequence=bool(row["sequence_parallel"]),
        pipeline=pipeline,
        shards=gpus // tensor // pipeline,
        micro_batch=int(row["micro_batch"]),
    )
    time = _predicted(model, gpus, efficiency, ALEPH_ALPHA_2023, layout, batch_size)
    per_token = 6 * model.parameters + 12 * model.layers * model.hidden * sequence
    needed = memory(model, DEVICE, ALEPH_ALPHA_2023, layout, batch_size).total
    return LlamaRun(
        layout=layout,
        published=row["mfu_percent"],
        mfu=100 * per_token * _TOKENS_A_STEP / time.total / gpus / DEVICE.peak_flops,
        needed=needed,
    )
