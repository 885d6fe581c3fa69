"""A workload of one's own, installed as a package of its own, trains as those that ship."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from elastrata.workload.workload import model_spec, stage_problems, tensor_problems
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Vocabulary
from support.command import ELASTRATA
from support.synthetic import VOCABULARY, write_data_set

IDS = Vocabulary(size=50, pad_id=0, mask_id=None, special_ids=(), continuation_ids=())
EXAMPLE = Path(__file__).parents[2] / "workloads" / "example"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example installed into it, as from an index."""
    folder = tmp_path_factory.mktemp("third-party")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=EXAMPLE, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(folder)], check=True)
    return folder


def _run(installed: Path, cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [ELASTRATA, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        encoding="utf-8",
        timeout=240,
    )


@pytest.mark.matrix  # a run of two workers
def test_it_trains_by_its_recipe_and_is_exported(installed: Path, tmp_path: Path) -> None:
    write_data_set(tmp_path / "data", samples=120, held_out=30)
    settings = ["data.path=data", "steps=6", "batch_size=20", "schedule.warmup_steps=1"]
    workers = "workers={min: 2, max: 2, cpus: 0.4, threads: 1, spares: false}"
    done = _run(installed, tmp_path, "train", "lstm/tiny", *settings, workers, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["steps"], result["world_sizes"]) == (6, [2])
    assert result["final_loss"] < np.log(VOCABULARY)
    audited = _run(installed, tmp_path, "audit", "lstm-tiny")
    assert audited.returncode == 0, audited.stderr
    exported = _run(installed, tmp_path, "export", "lstm-tiny", "--out", "model")
    assert exported.returncode == 0, exported.stderr
    sizes = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    assert (sizes["model_type"], sizes["vocab_size"]) == ("lstm", VOCABULARY)


def test_a_mistake_in_its_keys_is_told_as_any_other(installed: Path, tmp_path: Path) -> None:
    done = _run(installed, tmp_path, "train", "lstm/tiny", "workload.hidden_sise=3")
    assert done.returncode == 2
    assert done.stderr == (
        "command line: workload.hidden_sise: 3: unknown key (did you mean 'hidden_size'?)\n"
    )


def test_its_costs_need_not_be_counted_by_hand(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    from elastrata_lstm import Lstm

    lstm, ids = Lstm(hidden_size=16, num_layers=3), IDS
    matrices = 3 * 2 * (4 * 16 * 16) + 50 * 16  # two of each LSTM, and the head
    assert lstm.work(ids)([1, 10]).tolist() == [2 * matrices, 20 * matrices]
    assert lstm.flops([4, 6], {}, ids) == 60 * matrices


def test_its_class_stays_short() -> None:
    class_file = EXAMPLE / "elastrata_lstm" / "workload.py"
    assert len(class_file.read_text(encoding="utf-8").splitlines()) <= 100


def test_layouts_that_it_says_nothing_of_are_refused(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    from elastrata_lstm import Lstm

    lstm = Lstm()
    refused = "workload lstm cannot be"
    assert tensor_problems(lstm, 2) == [f"parallel.tensor: 2: expected 1: {refused} divided"]
    assert stage_problems(lstm, 2) == [
        f"parallel.pipeline: expected 1: {refused} divided into stages"
    ]
    with pytest.raises(UserError, match="lstm: the planner does not support such models"):
        model_spec(lstm, IDS, 64)
