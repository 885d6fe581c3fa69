"""A rehearsal in this process: a request comes as JSON, and so do the figures go."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from elastrata.rehearsal.process import Request
from elastrata.rehearsal.shim import load_shim
from elastrata_pipelines.errors import UserError


def main() -> None:
    """Reads the request from standard input."""
    values = json.load(sys.stdin)
    request = Request(**{**values, "overrides": tuple(values["overrides"])})
    try:
        load_shim()
        from elastrata.rehearsal.rehearse import figures

        answer: dict[str, object] = {"figures": asdict(figures(request))}
    except UserError as error:
        answer = {"problems": list(error.problems)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
