"""`elastrata evaluate`: tasks of the LM Evaluation Harness, given to a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastrata.cli.options import Json
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError

if TYPE_CHECKING:
    from elastrata.inference.harness import TaskResults
    from elastrata.run.export import ExportedModel


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="RUN|EXPORT", help="Folder or URL of a run; or a folder.")
    ],
    tasks: Annotated[
        str, typer.Option(metavar="TASK[,TASK]...", help="The harness' names of them.")
    ],
    include: Annotated[
        Path | None, typer.Option(help="Folder with YAML files of tasks of your own.")
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Solved examples before each question.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions at once.")] = 8,
    checkpoint: Annotated[
        str, typer.Option(help="Of a run: newest, best (smallest evaluation loss), or a step.")
    ] = "newest",
    weights: Annotated[
        str, typer.Option(help="Of a run: trained, average, or mean:K.")
    ] = "trained",
    json: Json = False,
) -> None:
    """Give a run's or an exported model tasks of the Language Model Evaluation Harness."""
    from elastrata.inference.harness import check_harness

    check_harness()
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks: empty: expected names of tasks, such as hellaswag,arc_easy")
    from elastrata.inference.harness import TaskOptions, Tasks
    from elastrata.inference.language_model import model_folder
    from elastrata.run.claim import place_of_model

    place = place_of_model(model)
    chosen = Tasks(names, include)
    options = TaskOptions(shots=shots, limit=limit, batch_size=batch_size)
    name = "harness" if weights == "trained" else f"harness/{weights.replace(':', '-')}"
    with model_folder(place, checkpoint=checkpoint, weights=weights) as folder:
        results = chosen.evaluate(folder.path, options)
        recorded = folder.run is not None and _record(place, folder.run, name, results)
    console = open_console(as_json=json)
    width = max((len(name) for name in results.metrics), default=0)
    for metric, value in results.metrics.items():
        console.print(f"{metric:<{width}}  {value:.4f}", markup=False)
    if recorded:
        console.print(f"in the run's MLflow record, as {name}/TASK/METRIC", markup=False)
    if json:
        print_json_line(
            {
                "model": model,
                "step": folder.run.step if folder.run else None,
                "metrics": dict(results.metrics),
                "samples": dict(results.samples),
                "recorded": recorded,
                "harness": results.harness,
            }
        )


def _record(place: str, model: ExportedModel, name: str, results: TaskResults) -> bool:
    """Adds results to the record of the run in that place, under a name; whether there is one."""
    from elastrata.tracking.tracker import record_evaluation
    from elastrata_pipelines.storage import Storage

    return record_evaluation(
        model.recipe.tracking,
        Storage(Storage(place).uri().rpartition("/")[0]),
        run_id=model.mlflow_run_id,
        step=model.step,
        metrics={f"{name}/{metric}": value for metric, value in results.metrics.items()},
    )
