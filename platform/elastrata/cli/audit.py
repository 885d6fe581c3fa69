"""`elastrata audit`: the proof that a run saw every sample once per epoch; a step's samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastrata.cli.options import Json, RunName
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError, pluralize

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.run.audit import Audit, Comparison
    from elastrata.run.step_samples import StepSample
    from elastrata.run.timeline import Attempt


_PROBLEM_LINES = 10


def audit(
    run: RunName,
    other: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Another run to compare with.")
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(min=0.0, help="Relative tolerance when comparing losses."),
    ] = 1e-4,
    steps: Annotated[bool, typer.Option("--steps", help="Show every step.")] = False,
    step: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Step whose samples --samples lists.")
    ] = None,
    samples: Annotated[
        bool, typer.Option("--samples", help="Only list the samples of --step K.")
    ] = False,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[SOURCE=]PATH",
            help="With --samples: text that was prepared, to show the documents of each sample.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Prove that a run saw every sample once per epoch, compare two runs, or list samples."""
    if samples or step is not None or text:
        list_samples(run, step, text or [], is_asked=samples, other=other, json=json)
        return
    from elastrata.run.audit import audit as audit_run
    from elastrata.run.audit import compare
    from elastrata.run.claim import find_run_folder

    console = open_console(as_json=json)
    audits = [audit_run(find_run_folder(url)) for url in (run, other) if url is not None]
    comparison = (
        compare(audits[0].steps, audits[1].steps, tolerance=tolerance) if len(audits) == 2 else None
    )
    for audited in audits:
        _show_audit(console, audited, with_steps=steps)
    if comparison:
        _show_comparison(console, comparison, tolerance)
    if json:
        print_json_line(_json_result(audits, comparison))
    same = comparison is None or (comparison.equal and comparison.first_difference is None)
    if not (same and all(audited.partition_ok for audited in audits)):
        # A run that is not proven is an answer, not an error; scripts see it by the exit code.
        raise typer.Exit(1)


def _json_result(audits: list[Audit], comparison: Comparison | None) -> dict[str, Any]:
    """Return the JSON values of the command: those of the first run, and the comparison with the
    second."""
    first, *others = (audited.to_dict() for audited in audits)
    difference = comparison and comparison.first_difference
    return {
        **first,
        "partition_ok": all(audited.partition_ok for audited in audits),
        "equal": comparison and comparison.equal,
        "first_difference": difference and asdict(difference),
        "max_relative_loss_difference": comparison and comparison.max_relative_loss_difference,
        "other": others[0] if others else None,
    }


def _show_audit(console: Console, audited: Audit, *, with_steps: bool) -> None:
    console.print(f"run  {audited.run}", markup=False)
    if audited.parent:
        console.print(f"parent  {audited.parent}", markup=False)
    _show_attempts(console, audited.attempts)
    if with_steps:
        _show_steps(console, audited)
    # One fault may give a line for every later step.
    for line in audited.problems[:_PROBLEM_LINES]:
        _print_verdict(console, "FAIL", line)
    if (more := len(audited.problems) - _PROBLEM_LINES) > 0:
        _print_verdict(console, "FAIL", f"and {more:,} more")
    if audited.data.state != "checked":
        _print_verdict(console, "warn", f"the digests could not be checked: {audited.data.text}")
    if audited.inherited.state == "missing":
        _print_verdict(
            console, "warn", f"steps of another run are not proven: {audited.inherited.text}"
        )
    for line in _proof_lines(audited) if audited.partition_ok else ():
        _print_verdict(console, "ok", line)
    console.print()


def _proof_lines(audited: Audit) -> list[str]:
    last, inherited = audited.steps[-1], audited.inherited
    lines = [
        f"{pluralize(last['step'], 'step')}, each recorded once; "
        f"{pluralize(last['samples'], 'sample')} without a gap"
    ]
    if inherited.state == "checked":
        lines.append("the parent's history matches the one that the fork continues")
    if audited.data.state == "checked":
        times = " and ".join(f"{epochs:,.2f}" for epochs in audited.epochs)
        lines.append(
            f"every digest matches the data set{'s' * (len(audited.epochs) > 1)}, {times} epochs: "
            "every sample once per epoch"
        )
    return lines


def _show_attempts(console: Console, attempts: tuple[Attempt, ...]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), header_style="bold")
    for heading in ("attempt", "workers", "steps", "from", "rolled back later"):
        table.add_column(heading, justify="left" if heading == "from" else "right")
    for attempt in attempts:
        table.add_row(
            str(attempt.attempt),
            str(attempt.world_size),
            f"{attempt.first}-{attempt.last}" if attempt.steps else "none",
            attempt.state + (f", step {attempt.step}" if attempt.step else ""),
            _format_rolled_back(attempt),
        )
    console.print(table)


def _format_rolled_back(attempt: Attempt) -> str:
    """Return the number of steps that were rolled back, as far as it is known."""
    if attempt.at_least:
        return f"at least {attempt.rolled_back:,}"
    return f"{attempt.rolled_back:,}" if attempt.rolled_back else ""


def _show_steps(console: Console, audited: Audit) -> None:
    """Print one line per step."""
    # Lines instead of a table, which would hold all steps in memory to align its columns.
    form = "{:>10}  {:>7}  {:>7}  {:<16}  {}"
    console.print(form.format("step", "attempt", "workers", "digest", "loss"), style="bold")
    for step in audited.steps:
        loss = f"{step['loss']:.6f}" + (" (skipped)" if step.get("skipped") else "")
        numbers = step["step"], step["attempt"], step["world_size"]
        console.print(form.format(*numbers, step["digest"], loss), markup=False)


def _show_comparison(console: Console, comparison: Comparison, tolerance: float) -> None:
    if comparison.equal:
        _print_verdict(console, "ok", "equal: the same steps, with the same samples in each")
    largest = f"{comparison.max_relative_loss_difference:.2g}, relative"
    difference = comparison.first_difference
    if difference:
        first, second = ("none" if value is None else value for value in difference.values)
        where = f"step {difference.step}: {difference.what}"
        _print_verdict(console, "FAIL", f"the runs first differ at {where}: {first} and {second}")
        _print_verdict(console, "warn", f"losses differ by at most {largest}")
    else:
        _print_verdict(
            console, "ok", f"losses differ by at most {largest} (tolerance {tolerance:g})"
        )


def _print_verdict(console: Console, sign: str, line: str) -> None:
    from rich.text import Text

    style = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}[sign]
    console.print(Text.assemble((f"{sign:<5}", style), line))


def list_samples(
    run: str,
    step: int | None,
    text: Sequence[str],
    *,
    is_asked: bool,
    other: str | None,
    json: bool,
) -> None:
    """Print the samples of a step.

    Raises:
        UserError: an option is missing or unexpected, or `step_samples` fails.
    """
    from elastrata.run.claim import find_run_folder
    from elastrata.run.step_samples import step_samples

    if not is_asked or step is None:
        option = "--samples" if is_asked else "--step" if step is not None else "--text"
        missing_option = "--step K" if is_asked else "--samples"
        raise UserError(f"{option}: requires {missing_option}")
    if other is not None:
        raise UserError(f"{other}: unexpected: --samples takes a single run")
    samples = step_samples(find_run_folder(run), step, _paths_by_source(text))
    console = open_console(as_json=json)
    for line in _sample_lines(samples):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json:
        print_json_line({"step": step, "samples": [sample.to_dict() for sample in samples]})


def _paths_by_source(arguments: Iterable[str]) -> dict[str, list[str]]:
    """Return the paths of the text by source; paths without a source belong to all sources."""
    from elastrata.run.step_samples import ANY

    paths = dict[str, list[str]]()
    for argument in arguments:
        name, equals, path = argument.partition("=")
        paths.setdefault(name if equals else ANY, []).append(path if equals else argument)
    return paths


def _sample_lines(samples: Sequence[StepSample]) -> Iterable[str]:
    data_set = None
    for sample in samples:
        if sample.data_set != data_set:
            data_set = sample.data_set
            yield f"{data_set}"
        tokens = pluralize(sample.tokens, "token", ">6,")
        place = f"  {sample.id}  {tokens}  {sample.shard}, row {sample.row:,}"
        yield f"{place}, epoch {sample.epoch}"
        if origin := sample.origin:
            token = "" if origin.token is None else f", from token {origin.token:,}"
            copy = f", copy {origin.copy}" if origin.copy else ""
            yield f"    {origin.source}: {origin.file}:{origin.line}{token}{copy}"
            yield f"    {origin.text}"
