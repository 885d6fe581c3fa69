"""The benchmark of slow networks, at its smallest."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.synthetic import write_data_set

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "slow_network.py"


def _namespaces() -> str:
    return subprocess.run(
        ["ip", "netns", "list"], capture_output=True, encoding="utf-8", check=True
    ).stdout


def _skip_where_there_are_no_namespaces() -> None:
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs iproute2")
    made = subprocess.run(
        ["ip", "netns", "add", "elastrata-try"], capture_output=True, encoding="utf-8"
    )
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", "elastrata-try"], check=True)


@pytest.mark.matrix
def test_what_is_sent_over_a_limited_cable(tmp_path: Path) -> None:
    _skip_where_there_are_no_namespaces()
    write_data_set(tmp_path, samples=200)
    ways = ["FSDP", "copies, bf16 sums, overlap"]
    command = [sys.executable, str(BENCHMARK), str(tmp_path), "workload.num_layers=1"]
    options = ["--only-print", "--parts", "1G", "--rounds", "1", "--techniques", *ways]
    before = _namespaces()
    done = subprocess.run([*command, *options], capture_output=True, encoding="utf-8", check=True)
    rate = json.loads(done.stdout.splitlines()[-1])
    sharded, copied = (rate["techniques"][way] for way in ways)
    # two gathers and a sum of half the model in 4 bytes, against a sum of all of it in 2
    assert sharded["sent_megabytes"] > 2 * copied["sent_megabytes"] > 0
    assert _namespaces() == before
