"""`make gpu`: every case is a row whatever becomes of it, and the next call goes on after it."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
TINY = ("--device", "cpu", "--tiny")
CASES = """
import os, signal, time
from pathlib import Path

class OutOfMemoryError(RuntimeError):
    pass

def fine(mark, **told):
    with Path(mark).open("a") as file:
        file.write("x")
    return {"mfu": {"median": 0.5}, **told}

def wrong(**_):
    return {"is_right": False, "difference": 2.0}

def no_memory(**_):
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

def fails(**_):
    raise ValueError("of two\\nlines")

def crashes(**_):
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(**_):
    if os.fork() == 0:  # its children go with it
        signal.pause()
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    """The command's module, which imports others beside it."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        return importlib.import_module("gpu")
    finally:
        sys.path.remove(str(SCRIPT.parent))


Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(gpu: ModuleType, tmp_path: Path) -> Run:
    (tmp_path / "their_cases.py").write_text(CASES, encoding="utf-8")

    def run_cases(*cases: Any, minutes: float = 60.0, again: bool = False) -> list[dict[str, Any]]:
        results = tmp_path / "rows.jsonl"
        rows = gpu.Rows(
            results,
            minutes=minutes,
            again=again,
            options={"device": "cpu"},
            environment={"PYTHONPATH": str(tmp_path)},
        )
        rows.run(cases)
        return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]

    return run_cases


def case_of(function: str, **fields: Any) -> Any:
    defaults = {"name": function, "seconds": 600.0}
    return sys.modules["gpu"].Case(function=f"their_cases:{function}", **(defaults | fields))


def test_every_case_is_a_row_whatever_becomes_of_it(run: Run, tmp_path: Path) -> None:
    mark = {"mark": str(tmp_path / "mark")}
    endings = ("wrong", "no_memory", "fails", "crashes")
    cases = [
        *(case_of(function) for function in endings),
        case_of("hangs", seconds=1.0),
        case_of("fine", values=mark),
        case_of("fine", name="smaller", values=mark, instead_of="no_memory"),
        case_of("fine", name="not wanted", values=mark, instead_of="smaller"),
    ]
    rows = run(*cases)
    assert [(row["case"], row["status"]) for row in rows] == [
        ("wrong", "wrong"),
        ("no_memory", "out of memory"),
        ("fails", "failed"),
        ("crashes", "crashed"),
        ("hangs", "timeout"),
        ("fine", "ok"),
        ("smaller", "ok"),
    ]
    by_name = {row["case"]: row for row in rows}
    assert by_name["fails"]["error"] == "ValueError: of two lines"
    assert by_name["crashes"]["error"].startswith("SIGSEGV")
    assert by_name["fine"]["device"] == "cpu"
    assert by_name["fine"]["mark"] == mark["mark"]
    assert run(*cases) == rows, "all are done"
    assert (tmp_path / "mark").read_text(encoding="utf-8") == "xx"
    again = run(*cases, again=True)
    assert [row["case"] for row in again[len(rows) :]] == ["wrong", "fails", "crashes", "hangs"]


def test_it_goes_on_after_a_row_that_was_cut_off(run: Run, tmp_path: Path) -> None:
    mark = {"mark": str(tmp_path / "mark")}
    first, second = (case_of("fine", name=name, values=mark) for name in ("a", "b"))
    (row,) = run(first)
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"case": "b", "stat')
    assert [row["case"] for row in run(first, second)] == ["a", "b"]
    assert run(first, second)[0] == row


def test_no_case_is_begun_without_time(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the end of all cuts off has no row either, and is begun anew."""
    mark = {"mark": str(tmp_path / "mark")}
    fine, late = (case_of("fine", name=name, values=mark) for name in ("fine", "late"))
    assert len(run(fine)) == 1
    assert len(run(late, minutes=0.0)) == 1
    monkeypatch.setattr("gpu._LEAST_SECONDS", 0.5)
    assert len(run(case_of("hangs"), late, minutes=0.02)) == 1


def test_the_table_names_what_there_is(gpu: ModuleType) -> None:
    names = [case.name for case in gpu.TABLE]
    assert len(set(names)) == len(names)
    for place, case in enumerate(gpu.TABLE):
        assert not case.instead_of or case.instead_of in names[:place]
    for module, _, function in {case.function.partition(":") for case in gpu.TABLE}:
        assert f"\ndef {function}(" in (SCRIPT.parent / f"{module}.py").read_text(encoding="utf-8")


def _from_an_empty_folder(folder: Path, *options: str) -> list[dict[str, Any]]:
    subprocess.run([sys.executable, SCRIPT, *options], cwd=folder, check=True)
    return [
        json.loads(line) for line in (folder / "gpu.jsonl").read_text(encoding="utf-8").splitlines()
    ]


_WITHOUT_OTHERS = """
import sys
sys.modules.update(dict.fromkeys({others}))  # None: as if it were not installed
sys.path.insert(0, {folder!r})
import gpu_cases
"""


def test_cases_import_nothing_that_make_gpu_does_not_install(gpu: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
    others = sorted(packages - set(gpu.NEEDED.values()) - {"torch"})
    program = _WITHOUT_OTHERS.format(others=others, folder=str(SCRIPT.parent))
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.matrix
def test_all_of_it_runs_on_a_cpu(gpu: ModuleType, tmp_path: Path) -> None:
    rows = _from_an_empty_folder(tmp_path, *TINY, "--minutes", "9")
    wanted = [case.name for case in gpu.TABLE if not case.instead_of]
    assert {row["case"]: row["status"] for row in rows} == dict.fromkeys(wanted, "ok")


@pytest.mark.matrix
def test_what_is_measured_runs_on_a_rehearsed_gpu(tmp_path: Path) -> None:
    """With models of their real sizes; what the plan has for too large is not begun."""
    rows = _from_an_empty_folder(
        tmp_path,
        *("--device", "fake", "--minutes", "9"),
        *("--cases", "machine,speed: gpt/125m,speed: gpt/1.3b,speed: gpt/7b,speed: bert/large"),
    )
    by_name = {row["case"]: row for row in rows}
    assert by_name["machine"]["device"] == "NVIDIA H100 80GB HBM3"
    for way in ("none", "selective", "full"):
        assert by_name.pop(f"speed: gpt/7b, {way}")["status"] == "out of memory"
    assert {row["status"] for row in by_name.values()} == {"ok"}
    measured = [row for row in by_name.values() if "plan_bytes" in row]
    ratios = [row["allocated_bytes"] / row["plan_bytes"] for row in measured]
    assert all(0.8 < ratio < 1.05 for ratio in ratios), ratios
