"""The process of a rehearsal: a new one, as fake CUDA must be there before torch is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastrata_pipelines.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be rehearsed, as it is typed."""

    recipe: str
    """Name or file."""
    overrides: tuple[str, ...]
    """`dotted.path=value`."""
    cluster: str
    phase: int = 0
    graphs: bool = True
    """Whether compilation is rehearsed, too, where the recipe compiles."""


def rehearse(request: Request) -> Mapping[str, Any]:
    """The figures of a rehearsal: the keys of `elastrata rehearse --json`.

    Raises:
        UserError: recipe or cluster cannot work, or there is no C++ compiler; a line each.
        RuntimeError: the step does not run; with the last line of what went wrong.
    """
    done = subprocess.run(
        [sys.executable, "-m", "elastrata.rehearsal"],
        input=json.dumps(asdict(request)),
        capture_output=True,
        encoding="utf-8",
        errors="replace",  # what libraries say has the machine's encoding
        check=False,
    )
    lines = done.stdout.splitlines()
    answer: Mapping[str, Any] = json.loads(lines[-1]) if lines and done.returncode == 0 else {}
    if "problems" in answer:
        raise UserError(*answer["problems"])
    if "figures" not in answer:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        error = RuntimeError(f"the step does not run: {said[-1] if said else done.returncode}")
        error.add_note(done.stderr)
        raise error
    figures: Mapping[str, Any] = answer["figures"]
    return figures
