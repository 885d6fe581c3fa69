"""Memory of GPUs is set up before CUDA starts, in commands and in workers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
_IN_A_WORKER = """
import os, sys
from elastrata.cluster.prestarted import import_ahead
assert "torch" not in sys.modules
import_ahead()
print(os.environ["PYTORCH_CUDA_ALLOC_CONF"])
"""
_IN_A_COMMAND = """
import os, sys, atexit
from elastrata.cli.main import main
atexit.register(lambda: print(os.environ["PYTORCH_CUDA_ALLOC_CONF"]))
sys.argv = ["elastrata", "--help"]
main()
"""


@pytest.mark.parametrize("program", [_IN_A_WORKER, _IN_A_COMMAND])
@pytest.mark.parametrize("said", [None, "max_split_size_mb:64"])
def test_segments_expand_unless_somebody_says_otherwise(program: str, said: str | None) -> None:
    environment = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}
    environment |= {VARIABLE: said} if said else {}
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert told.stdout.splitlines()[-1] == (said or "expandable_segments:True")
