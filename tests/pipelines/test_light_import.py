"""Importing the preparation is cheap: what is heavy is imported by the functions that use it."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("ray", "torch", "transformers", "tokenizers", "tiktoken")


def test_nothing_heavy_is_imported() -> None:
    script = f"""
import sys
import elastrata_pipelines.preparation, elastrata_pipelines.inspection
print([name for name in {HEAVY} if name in sys.modules])
"""
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert printed.stdout.decode().strip() == "[]"
