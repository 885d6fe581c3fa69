"""What a recipe may choose, through the real Ray Train: killed half-way, continued at another size.

Two recipes hold all of it. Each run has two workers until its driver is killed, and one from then
on; every step is compared with the same loop in one process, without Ray and undisturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastrata.checkpoints.commit import commits
from elastrata.core.record import StepRecord
from elastrata.core.schedule import ScheduleConfig, learning_rate
from elastrata.run import history
from elastrata_pipelines.storage import Storage
from support.bare_loop import train_on_ranks
from support.command import kill_group, run, start, wait_until
from support.ranks import run_ranks
from support.synthetic import tiny_recipe, write_data_set

STEPS, BATCH = 120, 21
LR = {"lamb": 0.1, "muon": 2e-2}
CLIP = {"method": "bucketwise", "max_norm": 0.3}
WARMUP = {"start": 5, "steps": 80, "multiple": 4}
POLYNOMIAL = {
    "shape": "polynomial",
    "power": 0.5,
    "warmup_steps": 30,
    "warmup_offset": 10,
    "decay_from": "first_step",
}
CHOICES: dict[str, dict[str, Any]] = {
    "lamb": {"optimizer": {"name": "lamb"}, "clip": CLIP, "batch_size_warmup": WARMUP},
    "muon": {"optimizer": {"name": "muon"}, "schedule": POLYNOMIAL},
}
RELATIVE = 1e-4
"""fp32 sums in another order differ by some 1e-7 each. Steps at such rates add that up and enlarge
it, as do LAMB's ratios and Newton-Schulz: to some 5e-6 between one and two ranks all the way."""
COMPILER = "no-such-compiler"
MISSING = (
    f"compile: true: {COMPILER} is not on the path",
    "workload.attention: varlen: there is none for this CPU",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choices")
    write_data_set(folder / "data", samples=400)
    return folder


def _values(folder: Path, name: str) -> dict[str, Any]:
    """A recipe that asks for a kernel which no CPU has, too."""
    changes = CHOICES[name]
    values = tiny_recipe(
        folder / "data",
        folder / "runs",
        **{**changes, "optimizer": {**changes["optimizer"], "lr": LR[name]}},
        steps=STEPS,
        checkpoint={"every": 10},
    )
    values["workload"]["attention"] = "varlen"
    return values


def _entries(folder: Path, name: str) -> list[Any]:
    return history.read(Storage(str(folder / "runs" / name / "history")))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_killed_and_continued_at_another_size_it_is_the_same_run(
    name, folder, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("CXX", COMPILER)
    values = _values(folder, name)
    recipe = folder / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    checkpoints = Storage(str(folder / "runs" / name / "checkpoints"))
    train, log = ("train", recipe, "compile=true"), tmp_path / "log"
    two = start(*train, "workers.min=2", "workers.max=2", log=log)
    wait_until(
        lambda: commits(checkpoints) and MISSING[-1] in log.read_text(encoding="utf-8"),
        300,
        "a checkpoint",
    )
    kill_group(two)

    one = run(*train)

    assert one.returncode == 0, one.stderr
    entries = _entries(folder, name)
    steps = history.effective_steps(entries)
    alone = run_ranks(1, train_on_ranks, values)[0]
    assert history.world_sizes(entries) == [2, 1]
    assert 0 < [e["step"] for e in entries if e["kind"] == "started"][1] < STEPS
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    assert [s["digest"] for s in steps] == [r.digest for r in alone]
    assert [s["lr"] for s in steps] == [r.lr for r in alone]
    assert [s["loss"] for s in steps] == pytest.approx([r.loss for r in alone], rel=RELATIVE)
    assert alone[-1].loss < alone[0].loss - 0.3
    _assert_chosen(name, alone)
    _assert_told_once(entries, log.read_text(encoding="utf-8") + one.stdout)


def _assert_chosen(name: str, records: Sequence[StepRecord]) -> None:
    """The choices did something."""
    sizes = [record.batch_samples for record in records]
    if name == "lamb":
        assert (sizes[0], sizes[-1]) == (5, BATCH)
        assert any(record.gradient_norm > CLIP["max_norm"] for record in records)
    else:
        schedule = ScheduleConfig.model_validate(POLYNOMIAL)
        rates = [learning_rate(schedule, peak=LR[name], step=k, steps=STEPS) for k in range(STEPS)]
        assert [record.lr for record in records] == rates
        assert rates[0] == pytest.approx(LR[name] * 11 / 31)


def _assert_told_once(entries: Sequence[Any], output: str) -> None:
    """By the first of two workers, and not again after the restart."""
    told = [entry["text"] for entry in entries if entry["kind"] == "substituted"]
    assert len(told) == len(MISSING)
    for line, start_of_line in zip(told, MISSING, strict=True):
        assert line.startswith(start_of_line)
        assert output.count(start_of_line) == 1
