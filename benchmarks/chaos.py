"""A long random history of faults: kills, hangs, drains and additions of workers and nodes.

    PYTHONPATH=tests python benchmarks/chaos.py --seed 1 --faults 20

What `make chaos` does, its report kept in `results/chaos.json`, or with `--mixed`, which trains on
three sources whose shares change, in `results/chaos_mixed.json`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from harness import parser_of, write_result

from support.rehearsal import problems, rehearse

TOLERANCE = 1e-4


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--mixed", action="store_true", help="on three sources, shares changing")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"logs: {folder}", flush=True)
    report = rehearse(folder, seed=arguments.seed, faults=arguments.faults, mixed=arguments.mixed)
    if found := problems(report, TOLERANCE):
        sys.exit("\n".join(found))
    shutil.rmtree(folder)
    name = "chaos_mixed" if arguments.mixed else "chaos"
    write_result(name, asdict(report), ("elastrata", "ray", "torch"))


if __name__ == "__main__":
    main()
