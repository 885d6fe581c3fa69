"""`elastrata doctor`: whether this machine, or a planned cluster, is ready."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from elastrata.cli.options import Json, Overrides
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.driver.doctor import Finding

_SIGNS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "problem": ("FAIL", "bold red")}


def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="With --cluster: a recipe to check against it."),
    ] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File or name, such as aws, of a cluster to check instead of this machine.",
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="Folder or URL to test by writing, reading back and deleting a file."),
    ] = None,
    tracking: Annotated[str | None, typer.Option(help="MLflow tracking URI to test.")] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster to check, instead of starting one on this machine."),
    ] = None,
    json: Json = False,
) -> None:
    """Check versions, hardware, Ray, storage and tracking, and advise on problems."""
    from elastrata.driver.doctor import examine

    if recipe is not None and cluster is None:
        raise UserError(f"{recipe}: requires --cluster FILE, the cluster to check it against")
    console = open_console(as_json=json)
    findings = []
    for finding in (
        _examine_cluster(cluster, recipe, overrides or [])
        if cluster is not None
        else examine(storage=storage, tracking=tracking, address=address)
    ):
        # Findings are shown as they come, because some checks take seconds.
        _show_finding(console, finding)
        findings.append(finding)
    problems = sum(finding.status == "problem" for finding in findings)
    console.print("no problems" if not problems else f"problems to fix: {problems}")
    if json:
        checks = [asdict(finding) for finding in findings]
        print_json_line({"ok": not problems, "checks": checks})
    if problems:
        raise typer.Exit(1)


def _examine_cluster(cluster: str, recipe: str | None, overrides: list[str]) -> Iterator[Finding]:
    from elastrata.deploy.clusters import (
        check_cluster,
        check_fit,
        check_niceness,
        find_cluster_file,
        read_cluster,
    )
    from elastrata.recipe.file import load_recipe

    spec = read_cluster(cluster)
    loaded = load_recipe(recipe, overrides) if recipe is not None else None
    yield from check_cluster(spec)
    yield from check_niceness(cluster, find_cluster_file(cluster).read_text(encoding="utf-8"))
    if loaded is not None:
        yield from check_fit(loaded.workers, spec)


def _show_finding(console: Console, finding: Finding) -> None:
    from rich.text import Text

    sign, style = _SIGNS[finding.status]
    line = Text.assemble((f"{sign:<5}", style), f"{finding.name:<13}", finding.found)
    if finding.advice:
        line.append(f"\n{'':<18}-> {finding.advice}", style="yellow")
    console.print(line)
