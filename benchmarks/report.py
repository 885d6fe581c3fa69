"""The result of a benchmark: figures with the command, the versions and the machine beside them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, figures: Mapping[str, Any], packages: tuple[str, ...]) -> None:
    """Prints figures and writes them to `results/<name>.json`.

    Of absolute paths on the command line only the last part is kept.

    Args:
        name: of the benchmark's file.
        figures: JSON values.
        packages: those whose versions matter.
    """
    arguments = " ".join(Path(a).name if Path(a).is_absolute() else a for a in sys.argv[1:])
    result = {
        "command": f"python benchmarks/{Path(sys.argv[0]).name} {arguments}".strip(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in packages},
        },
        **figures,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def versions_in(python: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """The versions of packages in another environment.

    Args:
        python: that environment's.
        packages: their names.
    """
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run([python, "-c", code, *packages], check=True, capture_output=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions
