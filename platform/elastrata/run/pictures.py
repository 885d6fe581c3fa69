"""The plots of a run: drawn from its history, stored in its folder and in its MLflow record."""

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
    length_strata,
    loss_curve,
    plot_held_out_losses,
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
    """Draw the plots of a run; write them to its folder `plots/` and to MLflow.

    Every run gets the loss curve and the length strata. A run with weights at zero also gets their
    share and the FLOPs; one with sources, their shares and losses; one with sources or
    `evaluation.sets`, their held-out losses.

    Args:
        run: the run's folder, whose history has at least one step.
        length_histogram: of the training data, from its manifest.
        tracker: the run's open record.
    """
    with TemporaryDirectory() as scratch:
        entries = history.read_entries(run.sub("history"))
        steps = history.effective_steps(entries)
        loss_curve(losses(entries, steps), Path(scratch) / LOSS_CURVE)
        if any(step.get("flops_of_zeros") for step in steps):
            sparsity_curves(steps, Path(scratch) / SPARSITY)
            flops_curves(steps, Path(scratch) / FLOPS)
        if any(step.get("batch_tokens_by_source") for step in steps):
            share_curves(steps, Path(scratch) / SHARES)
            source_losses(steps, Path(scratch) / SOURCE_LOSSES)
        held_out = evaluations(entries, steps)
        if any(losses_by_source(one) or losses_by_set(one) for one in held_out):
            plot_held_out_losses(held_out, Path(scratch) / HELD_OUT_LOSSES)
        length_strata(length_histogram, Path(scratch) / LENGTH_STRATA)
        # Drawn completely before any is published, so that all show the same state.
        for path in sorted(Path(scratch).iterdir()):
            data = path.read_bytes()
            run.write(data, FOLDER, path.name)
            tracker.log_artifact(path.name, data, FOLDER)


def evaluations(
    entries: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> list[dict[str, float]]:
    """Return the metrics of each effective evaluation by name, with `tokens` seen.

    Args:
        entries: the run's history.
        steps: the effective steps.
    """
    # A run can be evaluated before its first step.
    tokens = {0: 0} | {step["step"]: step["tokens"] for step in steps}
    return [
        {**metrics_of(entry), "tokens": tokens[entry["step"]]}
        for entry in history.surviving_evaluations(entries)
        if entry["step"] in tokens
    ]


def losses(
    entries: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the training and held-out losses of the run without those that were rolled back.

    Args:
        entries: the run's history.
        steps: the effective steps.
    """
    held_out = {
        entry["step"]: entry["eval/loss"] for entry in history.surviving_evaluations(entries)
    }
    return [{"step": record["step"], "loss": record["loss"]} for record in steps] + [
        {"step": step, "eval_loss": loss} for step, loss in sorted(held_out.items())
    ]
