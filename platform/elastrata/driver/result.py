"""The result of a run, as `elastrata.train` returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastrata.run import history
from elastrata.run.goodput import TimeToTarget
from elastrata_pipelines.storage import Storage

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from elastrata.run.audit import Audit


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished run. The field names are the keys of `elastrata train --json`."""

    run_dir: str
    mlflow_run_id: str
    steps: int
    samples_seen: int
    tokens_seen: int
    final_loss: float
    world_sizes: list[int]
    """World size of every group of workers that took part, in order."""
    status: str
    target: TimeToTarget | None
    """Whether and when the recipe's target was reached; None without a target."""

    @property
    def history(self) -> pd.DataFrame:
        """A data frame with a row for every step that counts, indexed by `step`: loss, lr, seconds
        and all other values of its record, and `eval/...` if it was evaluated."""
        import pandas as pd

        entries = history.read_entries(Storage(self.run_dir).sub("history"))
        steps = pd.DataFrame(history.effective_steps(entries)).set_index("step")
        evaluations = history.surviving_evaluations(entries)
        evaluated = pd.DataFrame(
            {k: v for k, v in entry.items() if k == "step" or k.startswith("eval/")}
            for entry in evaluations
        )
        return (
            # A step may have been evaluated again after a restart.
            steps.join(evaluated.drop_duplicates("step", keep="last").set_index("step"))
            if evaluations
            else steps
        )

    def plot(self) -> Figure:
        """Plot training and held-out loss over the steps."""
        from elastrata.run.pictures import losses
        from elastrata.tracking.plots import loss_figure

        entries = history.read_entries(Storage(self.run_dir).sub("history"))
        return loss_figure(losses(entries, history.effective_steps(entries)))

    def export(
        self,
        out: str | Path,
        *,
        checkpoint: str = "newest",
        weights: str = "trained",
        dtype: str = "fp32",
        shard_size: str = "5GB",
    ) -> Path:
        """Write the model for transformers' `from_pretrained`; see `elastrata export`.

        Args:
            out: the folder to write; must be empty or missing.
            checkpoint: `newest`, `best` (smallest evaluation loss), or a step.
            weights: weights of the checkpoint: `trained`, `average`, or `mean:K`, the mean of the
                last K.
            dtype: data type of the weights: fp32, bf16 or fp16.
            shard_size: largest size of a file of weights, such as 500MB.

        Returns:
            The folder.

        Raises:
            UserError: the checkpoint does not exist, or `out` is in use.
        """
        from elastrata.run.export import export_model
        from elastrata.workload.hf_folder import weight_form

        form = weight_form(dtype, shard_size)
        return export_model(
            self.run_dir, Path(out), checkpoint=checkpoint, weights=weights, form=form
        ).path

    def evaluate(
        self, *, checkpoint: str = "newest", weights: str | None = None
    ) -> Mapping[str, float]:
        """Compute the held-out loss and metrics of a checkpoint, in this process.

        Args:
            checkpoint: `newest`, `best` (smallest evaluation loss), or a step.
            weights: as in `export`; None for those that training evaluated.

        Raises:
            UserError: the checkpoint does not exist, or no data is held out.
        """
        from elastrata.inference.evaluation import evaluate_run

        return evaluate_run(self.run_dir, checkpoint, weights)

    def audit(self) -> Audit:
        """Prove step by step which samples the run was trained on."""
        from elastrata.run.audit import audit

        return audit(Storage(self.run_dir))

    def __str__(self) -> str:
        return "\n".join(f"{name:<14}{value}" for name, value in self._rows().items())

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
            for name, value in self._rows().items()
        )
        return f"<table>{''.join(rows)}</table>"

    def _rows(self) -> dict[str, str]:
        values: dict[str, Any] = {**asdict(self), "target": self.target or "none"}
        return {
            name: f"{value:,}" if isinstance(value, int) else str(value)
            for name, value in values.items()
        }
