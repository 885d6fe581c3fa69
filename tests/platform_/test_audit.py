"""The audit: a run as it was is proven; a run whose history was touched is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastrata import Recipe
from elastrata.cli.main import run
from elastrata.run.audit import (
    Expectation,
    compare,
    digest_of,
    expectation,
    position_problems,
    relative_difference,
    sequence_problems,
)
from elastrata.run.fork import span
from elastrata.run.history import read_entries
from elastrata_pipelines.storage import Storage
from support.documented import documented_keys
from support.histories import BATCH, Entry, started, stepped, write_part
from support.lone_run import train_alone
from support.synthetic import tiny_recipe, write_data_set

STEPS, SAMPLES = 60, 400


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 60 steps of 21 samples: three times through its data set and more.
    That of a group of workers is audited in `test_api.py`."""
    folder = tmp_path_factory.mktemp("audit")
    write_data_set(folder / "data", samples=SAMPLES, held_out=20)
    recipe = tiny_recipe(folder / "data", folder / "runs", steps=STEPS, name="one")
    return train_alone(Recipe.model_validate(recipe), folder / "runs" / "one")


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


def _alter(copy: Path, change: Callable[[list[Entry]], object]) -> None:
    """Writes the history of a run anew, in one part, after `change` has changed its entries. It has
    no chain then, and neither has nor names checkpoints, which would tell."""
    shutil.rmtree(copy / "checkpoints", ignore_errors=True)
    folder = copy / "history"
    entries = [
        entry for entry in read_entries(Storage(str(folder))) if entry["kind"] != "committed"
    ]
    change(entries)
    shutil.rmtree(folder)
    by_attempt: dict[int, list[Entry]] = {}
    for entry in entries:
        by_attempt.setdefault(entry["attempt"], []).append(entry)
    for attempt, lines in by_attempt.items():
        write_part(folder / f"{attempt:04d}-00000000.jsonl", lines)


def _step(entries: list[Entry], number: int) -> Entry:
    return next(entry for entry in entries if entry["kind"] == "step" and entry["step"] == number)


def _audit(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of the command."""
    capsys.readouterr()
    code = run(["audit", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_run_is_proven(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = _audit(capsys, trained)
    assert code == 0
    assert list(result) == documented_keys("audit")
    done = read_entries(Storage(str(trained / "history")))
    assert result.pop("digest") == digest_of([_step(done, n + 1) for n in range(STEPS)])
    attempt = {"attempt": 1, "world_size": 1, "first": 1, "last": STEPS, "rolled_back": 0}
    attempt["at_least"] = False
    assert result == {
        "run": str(trained),
        "partition_ok": True,
        "steps": STEPS,
        "attempts": [{**attempt, "state": "new", "step": 0}],
        "digests_checked": STEPS,
        "data": "checked",
        "inherited": "none",
        "parent": None,
        "problems": [],
        "equal": None,
        "first_difference": None,
        "max_relative_loss_difference": None,
        "other": None,
    }
    assert run(["audit", str(trained), "--steps"]) == 0
    shown = capsys.readouterr().out
    assert f"{STEPS} steps, each recorded once; 1,260 samples without a gap" in shown
    assert "3.15 epochs: every sample once per epoch" in shown
    assert _step(read_entries(Storage(str(trained / "history"))), 17)["digest"] in shown


def test_two_runs_are_equal(trained: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = _audit(capsys, trained, copy)
    assert code == 0
    assert (result["equal"], result["first_difference"]) == (True, None)
    assert result["max_relative_loss_difference"] == 0.0
    assert result["other"]["run"] == str(copy)
    assert run(["audit", str(trained), str(copy)]) == 0
    assert "equal: the same steps, with the same samples in each" in capsys.readouterr().out


def test_a_run_that_was_rolled_back_is_proven(
    trained: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def roll_back(entries: list[Entry]) -> None:
        again = [dict(_step(entries, number)) for number in range(51, STEPS + 1)]
        entries.append(started(2, 50, world_size=3, state="hot"))
        for step in again:
            changed = {"attempt": 2, "world_size": 3, "loss": step["loss"] * (1 + 1e-6)}
            entries.append({**step, **changed})

    _alter(copy, roll_back)
    code, result = _audit(capsys, trained, copy)
    assert (code, result["equal"], result["other"]["digests_checked"]) == (0, True, STEPS)
    assert 1e-7 < result["max_relative_loss_difference"] < 1e-5
    first, second = result["other"]["attempts"]
    assert (first["first"], first["last"], first["rolled_back"]) == (1, STEPS, 10)
    assert (second["first"], second["last"], second["rolled_back"]) == (51, STEPS, 0)
    assert (second["world_size"], second["state"], second["step"]) == (3, "hot", 50)


def test_an_altered_digest_is_found(
    trained: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _alter(copy, lambda entries: _step(entries, 17).update(digest="0123456789abcdef"))
    code, result = _audit(capsys, copy)
    assert (code, result["partition_ok"]) == (1, False)
    (problem,) = result["problems"]
    assert problem.startswith("step 17: digest 0123456789abcdef, but the data set gives ")
    code, result = _audit(capsys, trained, copy)
    assert (code, result["equal"], result["partition_ok"]) == (1, False, False)
    difference = result["first_difference"]
    assert (difference["step"], difference["what"]) == (17, "digest")
    assert difference["values"][1] == "0123456789abcdef"
    assert run(["audit", str(copy)]) == 1
    assert "FAIL step 17: digest 0123456789abcdef" in capsys.readouterr().out


def test_a_dropped_step_is_found(
    trained: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _alter(copy, lambda entries: entries.remove(_step(entries, 3)))
    code, result = _audit(capsys, copy)
    assert (code, result["partition_ok"], result["steps"]) == (1, False, STEPS - 1)
    assert result["problems"] == [
        "step 3: missing in the history",
        f"epoch 0: {BATCH} samples never seen",
    ]
    code, result = _audit(capsys, trained, copy)
    assert (code, result["equal"]) == (1, False)
    assert (result["first_difference"]["step"], result["first_difference"]["what"]) == (
        3,
        "missing",
    )
    assert result["first_difference"]["values"][1] is None


def test_without_its_data_set_a_run_is_checked_by_positions(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = json.loads((copy / "run.json").read_text(encoding="utf-8"))
    (data_set,) = identity["data"]

    def audit_with(where: Path) -> tuple[int, dict[str, Any]]:
        (copy / "run.json").write_text(
            json.dumps({**identity, "data": [{**data_set, "url": str(where)}]}), encoding="utf-8"
        )
        return _audit(capsys, copy)

    code, result = audit_with(copy / "gone")
    assert (code, result["data"], result["digests_checked"]) == (0, "missing", 0)
    assert result["partition_ok"]
    write_data_set(copy / "other", samples=SAMPLES, seed=5)
    assert audit_with(copy / "other")[1]["data"] == "changed"
    shutil.copytree(data_set["url"], copy / "damaged")
    shard = next((copy / "damaged" / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-100])
    assert audit_with(copy / "damaged")[1]["data"] == "damaged"
    assert run(["audit", str(copy)]) == 0
    shown = capsys.readouterr().out
    assert f"the digests could not be checked: {shard}: the shard is damaged" in shown


def test_bad_input_is_told(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", str(copy / "nowhere")]) == 2
    assert "no run here (run.json is missing)" in capsys.readouterr().err
    part = max((copy / "history").iterdir(), key=lambda path: path.stat().st_size)
    text = part.read_text(encoding="utf-8")
    part.write_text(text[: len(text) // 2], encoding="utf-8")
    assert run(["audit", str(copy)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(
        f"{part}, line {len(part.read_text(encoding='utf-8').splitlines())}: not JSON"
    )
    shutil.rmtree(copy / "history")
    assert run(["audit", str(copy)]) == 2
    assert f"{copy}/history: no step is recorded yet" in capsys.readouterr().err


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expectation:
    folder = tmp_path_factory.mktemp("expectation")
    manifest = write_data_set(folder, samples=SAMPLES)
    return expectation(Storage(str(folder)), manifest, seed=7, window_stripes=4)


def _as_expected(expected: Expectation, spans: list[tuple[int, int]]) -> list[Entry]:
    """Steps that saw just the samples at these positions."""
    return [
        stepped(
            1,
            number,
            samples=first + count,
            batch_samples=count,
            digest=expected.digest_of(first, count),
        )
        for number, (first, count) in enumerate(spans, start=1)
    ]


def sample_problems(steps: list[Entry], expected: Expectation) -> list[str]:
    return expected.partition_problems([span(step) for step in steps])


def test_a_run_that_left_samples_out_or_saw_them_twice_is_found(expected: Expectation) -> None:
    skipped = _as_expected(expected, [(0, 100), (121, 100), (221, 179)])
    assert position_problems(skipped) == [
        "step 2: 221 samples seen after it, but 100 before it and 100 in it"
    ]
    assert sample_problems(skipped, expected) == ["epoch 0: 21 samples never seen"]
    twice = _as_expected(expected, [(0, 100), (90, 100), (190, 100)])
    assert len(position_problems(twice)) == 1
    assert sample_problems(twice, expected) == ["epoch 0: 10 samples seen more than once"]


def test_steps_that_are_twice_or_missing_or_nobodys_are_found() -> None:
    twice = [started(1, 0), *(stepped(1, number) for number in (1, 2, 2, 3))]
    assert sequence_problems(twice) == ["step 2: more than once in the history"]
    gap = [started(1, 0), stepped(1, 1), started(2, 5), stepped(2, 6)]
    assert sequence_problems(gap) == ["steps 2 to 5: missing in the history"]
    orphan = [started(1, 0), stepped(1, 1), stepped(2, 2)]
    assert sequence_problems(orphan) == ["attempt 2: has steps, but no start"]


def test_losses_that_are_not_finite_are_compared() -> None:
    nan = float("nan")
    assert relative_difference(nan, nan) == 0.0
    assert relative_difference(0.0, 0.0) == 0.0
    assert relative_difference(1.0, nan) == float("inf")
    one, other = [stepped(1, 1, loss=2.0)], [stepped(1, 1, loss=nan)]
    compared = compare(one, other, tolerance=1e-4)
    assert compared.equal
    assert compared.max_relative_loss_difference == 0.0
    assert compared.first_difference is not None
    assert compared.first_difference.values == (2.0, None)
