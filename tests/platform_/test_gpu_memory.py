"""Memory of a GPU, rehearsed: what counts as the peak of training."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

_PEAKS = """
import json
from elastrata.rehearsal.shim import load_shim
load_shim()
import torch
from elastrata.bench.samples import bench_samples
from elastrata.bench.step import measure_steps
from elastrata.recipe.file import load_recipe
from elastrata.rehearsal.session import rehearsal

recipe = load_recipe("gpt/125m", ["compile=false", "workload.num_layers=2", "batch_size=4"])
samples = bench_samples(recipe, "full", steps=2)
with rehearsal(world_size=None) as ledger:
    building = torch.empty(2**33, dtype=torch.uint8, device="cuda")
    del building
    before = ledger.peak_bytes
    steps = measure_steps(recipe, samples, warm_up=1).peak_memory_bytes
print(json.dumps([before, steps]))
"""


def _told(program: str) -> Any:
    """What a program on fake CUDA, which needs a process of its own, prints last."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_peak_of_training_leaves_out_what_was_there_before() -> None:
    before, steps = _told(_PEAKS)
    assert before == 2**33
    assert 0 < steps < 2**33
