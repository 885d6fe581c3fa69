"""A random history of faults, again and another each time.

make chaos
python tests/faults/chaos.py --seed 3 --faults 12 --mixed
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.rehearsal import problems, rehearse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10_000)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--mixed", action="store_true", help="three sources, shares that change")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    report = rehearse(folder, seed=arguments.seed, faults=arguments.faults, mixed=arguments.mixed)
    print(json.dumps({**asdict(report), "faults": len(report.faults)}, indent=1))
    if found := problems(report, arguments.tolerance):
        sys.exit("\n".join([*found, f"logs: {folder}"]))
    shutil.rmtree(folder)
    print(f"the run did not notice {len(report.faults)} faults")


if __name__ == "__main__":
    main()
