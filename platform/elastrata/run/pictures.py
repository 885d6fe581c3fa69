"""The pictures of a run: drawn from its history, kept in its folder and on its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from elastrata.run import history
from elastrata.run.entries import metrics_of
from elastrata.step.records import losses_by_set, losses_by_source
from elastrata.tracking.plots import (
    flops_curves,
    held_out_losses,
    length_strata,
    loss_curve,
    share_curves,
    source_losses,
    sparsity_curves,
)
from elastrata.tracking.tracker import Tracker
from elastrata_pipelines.storage import Storage

FOLDER = "plots"
LOSS_CURVE, LENGTH_STRATA = "loss-curve.png", "length-strata.png"
SPARSITY, FLOPS = "sparsity.png", "flops.png"
SHARES, SOURCE_LOSSES = "source-shares.png", "source-losses.png"
HELD_OUT_LOSSES = "held-out-losses.png"


def publish_pictures(run: Storage, length_histogram: Sequence[int], tracker: Tracker) -> None:
    """Draws the loss curve and the length strata, of a run with weights at zero their share and the
    FLOPs, of one with sources their shares and losses, and of one with sources or
    `evaluation.sets` their held-out losses; writes them to `plots/` of the run and to MLflow.

    Args:
        run: the run's folder; its history holds a step at least.
        length_histogram: of the training data, as the manifest has it.
        tracker: the run's open record.
    """
    with TemporaryDirectory() as scratch:
        entries = history.read(run.sub("history"))
        steps = history.effective_steps(entries)
        loss_curve(losses(entries, steps), Path(scratch) / LOSS_CURVE)
        if any(step.get("flops_of_zeros") for step in steps):
            sparsity_curves(steps, Path(scratch) / SPARSITY)
            flops_curves(steps, Path(scratch) / FLOPS)
        if any(step.get("batch_tokens_by_source") for step in steps):
            share_curves(steps, Path(scratch) / SHARES)
            source_losses(steps, Path(scratch) / SOURCE_LOSSES)
        told = evaluations(entries, steps)
        if any(losses_by_source(one) or losses_by_set(one) for one in told):
            held_out_losses(told, Path(scratch) / HELD_OUT_LOSSES)
        length_strata(length_histogram, Path(scratch) / LENGTH_STRATA)
        for path in sorted(Path(scratch).iterdir()):
            data = path.read_bytes()
            run.write(data, FOLDER, path.name)
            tracker.log_artifact(path.name, data, FOLDER)


def evaluations(
    entries: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> list[dict[str, float]]:
    """The metrics of the evaluations that count, by name, each with `tokens` seen.

    Args:
        entries: of the history.
        steps: those of them that count.
    """
    tokens = {0: 0} | {step["step"]: step["tokens"] for step in steps}
    return [
        {**metrics_of(entry), "tokens": tokens[entry["step"]]}
        for entry in history.surviving_evaluations(entries)
        if entry["step"] in tokens
    ]


def losses(
    entries: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Training and held-out losses of the run as it counts, without what was rolled back.

    Args:
        entries: of its history.
        steps: those of them that count.
    """
    held_out = {
        entry["step"]: entry["eval/loss"] for entry in entries if entry["kind"] == "evaluated"
    }
    return [{"step": record["step"], "loss": record["loss"]} for record in steps] + [
        {"step": step, "eval_loss": loss} for step, loss in sorted(held_out.items())
    ]
