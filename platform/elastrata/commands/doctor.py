"""`elastrata doctor`: whether this machine is ready."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from elastrata.commands.options import Json
from elastrata.terminal.console import open_console, print_json_line

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.launch.doctor import Finding

_SIGNS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "problem": ("FAIL", "bold red")}


def doctor(
    storage: Annotated[
        str | None, typer.Option(help="Folder or URL to try: writes, reads back, deletes.")
    ] = None,
    tracking: Annotated[
        str | None, typer.Option(help="MLflow tracking URI to try to reach.")
    ] = None,
    json: Json = False,
) -> None:
    """Check versions, hardware, Ray, storage and tracking; say what to do about problems."""
    from elastrata.launch.doctor import examine

    console = open_console(as_json=json)
    findings = []
    for finding in examine(storage=storage, tracking=tracking):
        _show(console, finding)
        findings.append(finding)
    problems = sum(finding.status == "problem" for finding in findings)
    console.print("all is well" if not problems else f"{problems} to put right")
    if json:
        checks = [asdict(finding) for finding in findings]
        print_json_line({"ok": not problems, "checks": checks})
    if problems:
        raise typer.Exit(1)


def _show(console: Console, finding: Finding) -> None:
    from rich.text import Text

    sign, style = _SIGNS[finding.status]
    line = Text.assemble((f"{sign:<5}", style), f"{finding.name:<13}", finding.found)
    if finding.advice:
        line.append(f"\n{'':<18}-> {finding.advice}", style="yellow")
    console.print(line)
