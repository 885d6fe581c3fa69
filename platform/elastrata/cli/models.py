"""`elastrata export`, `evaluate` and `generate`: uses of a trained model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from elastrata.cli.options import Json, RunName, local_path
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError, pluralize

if TYPE_CHECKING:
    from elastrata.inference.evaluation import TaskResults
    from elastrata.run.export import ExportedModel


def export(
    run: RunName,
    out: Annotated[
        Path,
        typer.Option(callback=local_path, help="New or empty folder to write."),
    ],
    checkpoint: Annotated[
        str, typer.Option(help="Checkpoint: newest, best (smallest evaluation loss), or a step.")
    ] = "newest",
    weights: Annotated[
        str,
        typer.Option(
            help="trained, average (`average` in recipes), or mean:K (of the last K checkpoints)."
        ),
    ] = "trained",
    dtype: Annotated[
        str, typer.Option(help="Number format of the weights: fp32, bf16 or fp16.")
    ] = "fp32",
    shard_size: Annotated[
        str, typer.Option(help="Maximum size of a weights file, such as 500MB or 5GB.")
    ] = "5GB",
    push: Annotated[
        str | None,
        typer.Option(
            metavar="REPO",
            help="Also push it to the Hugging Face Hub, to OWNER/NAME; created if missing.",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make the repository public if --push creates it.")
    ] = False,
    register: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Also register it in MLflow as a version of the model NAME.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a trained model as a folder for transformers' from_pretrained."""
    from elastrata.run.claim import find_run_folder
    from elastrata.run.export import HubRepository, check_free, export_model
    from elastrata.tracking.tracker import check_model_name
    from elastrata.workload.hf_folder import weight_form

    console = open_console(as_json=json)
    # All options are checked before the export, which may take minutes.
    form = weight_form(dtype, shard_size)
    if register is not None:
        check_model_name(register)
    run = find_run_folder(run).url
    check_free(out)
    console.print(f"exporting {run}", markup=False)
    # The repository is created before the export, so that a refusal of the hub comes early.
    repository = HubRepository(push, public=public) if push is not None else None
    model = export_model(run, out, checkpoint=checkpoint, weights=weights, form=form)
    loader = model.recipe.workload.exported_as.loader
    registered = None if register is None else _register_model(run, model, register, checkpoint)
    pushed = repository.push(model.path, f"Step {model.step:,}") if repository else None
    lines = [
        f"model    {model.path}",
        f"next     from transformers import {loader}; "
        f"{loader}.from_pretrained({str(model.path)!r})",
        *([f"mlflow   mlflow.transformers.load_model('{registered}')"] if registered else []),
        *([f"pushed   {pushed}"] if pushed else []),
    ]
    console.print("\n".join(lines), markup=False)
    if json:
        result = {"path": str(model.path), "loader": loader, "registered": registered}
        print_json_line({**result, "dtype": model.dtype, "pushed": pushed})


def _register_model(run: str, model: ExportedModel, name: str, checkpoint: str) -> str:
    from elastrata.run.export import to_loadable
    from elastrata.tracking.tracker import register_export
    from elastrata_pipelines.storage import Storage

    root, _, run_name = Storage(run).uri().rpartition("/")
    with TemporaryDirectory() as scratch:
        return register_export(
            model.recipe.tracking,
            Storage(root),
            run_id=model.mlflow_run_id,
            run_name=run_name,
            model=to_loadable(model, Path(scratch)),
            name=name,
            alias=checkpoint if checkpoint in ("newest", "best") else None,
        )


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="RUN|EXPORT", help="Folder or URL of a run; or a folder.")
    ],
    tasks: Annotated[
        str, typer.Option(metavar="TASK[,TASK]...", help="Names of tasks of the harness.")
    ],
    include: Annotated[
        Path | None, typer.Option(help="Folder with YAML files of your own tasks.")
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Number of solved examples before each question.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of questions per task.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions per batch.")] = 8,
    checkpoint: Annotated[
        str, typer.Option(help="Of a run: newest, best (smallest evaluation loss), or a step.")
    ] = "newest",
    weights: Annotated[
        str, typer.Option(help="Weights of a run: trained, average, or mean:K.")
    ] = "trained",
    json: Json = False,
) -> None:
    """Evaluate a model on tasks of the Language Model Evaluation Harness."""
    from elastrata.inference.evaluation import check_harness

    # Checked before the other imports, so that a missing harness is reported immediately.
    check_harness()
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks: empty: expected names of tasks, such as hellaswag,arc_easy")
    from elastrata.inference.evaluation import TaskOptions, Tasks
    from elastrata.inference.language_model import model_folder
    from elastrata.run.claim import find_model

    console = open_console(as_json=json)
    place = find_model(model)
    console.print(f"evaluating {model}", markup=False)
    harness_tasks = Tasks(names, include)
    options = TaskOptions(shots=shots, limit=limit, batch_size=batch_size)
    name = "harness" if weights == "trained" else f"harness/{weights.replace(':', '-')}"
    with model_folder(place, checkpoint=checkpoint, weights=weights) as folder:
        results = harness_tasks.evaluate(folder.path, options)
        # An exported folder belongs to no run.
        recorded = folder.run is not None and _record_evaluation(place, folder.run, name, results)
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


def _record_evaluation(place: str, model: ExportedModel, name: str, results: TaskResults) -> bool:
    """Add results to the record of the run in `place` under a name; return whether it has a
    record."""
    from elastrata.tracking.tracker import record_evaluation
    from elastrata_pipelines.storage import Storage

    run_dir = Storage(place).uri()
    return record_evaluation(
        model.recipe.tracking,
        Storage(run_dir.rpartition("/")[0]),
        run_id=model.mlflow_run_id,
        run_dir=run_dir,
        step=model.step,
        metrics={f"{name}/{metric}": value for metric, value in results.metrics.items()},
    )


def generate(
    model: Annotated[
        str, typer.Argument(metavar="RUN|EXPORT", help="Folder or URL of a run; or a folder.")
    ],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Text file to compute the model's perplexity on.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0: always the likeliest token.")
    ] = 1.0,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, help="Sample from this many of the likeliest tokens. Default: all."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    checkpoint: Annotated[
        str, typer.Option(help="Of a run: newest, best (smallest evaluation loss), or a step.")
    ] = "newest",
    json: Json = False,
) -> None:
    """Continue a text with a model, or show the model's perplexity on a file."""
    if prompt is None and file is None:
        raise UserError("expected --prompt TEXT to continue, or --file PATH for the perplexity")
    # The file is read before the heavy imports, so that a wrong path fails immediately.
    text = _read_text(file)
    from elastrata.run.claim import find_model

    place = find_model(model)
    from elastrata.inference.language_model import (
        Sampling,
        compute_perplexity,
        continue_text,
        load_language_model,
    )

    console = open_console(as_json=json)
    loaded = load_language_model(place, checkpoint=checkpoint)
    generated = text_perplexity = None
    if prompt is not None:
        sampling = Sampling(temperature=temperature, top_k=top_k, seed=seed)
        generated = continue_text(loaded, prompt, tokens=tokens, sampling=sampling)
        console.print(prompt + generated.text, markup=False)
    if text is not None:
        text_perplexity = compute_perplexity(loaded, text)
        console.print(
            f"perplexity {text_perplexity.perplexity:.2f}, loss {text_perplexity.loss:.4f} over "
            f"{pluralize(text_perplexity.tokens, 'token')} of {file}",
            markup=False,
        )
    if json:
        print_json_line(
            {
                "model": model,
                "prompt": prompt,
                "continuation": asdict(generated) if generated else None,
                "perplexity": asdict(text_perplexity) if text_perplexity else None,
            }
        )


def _read_text(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"--file: {file}: cannot be read ({reason})") from None
