"""Files of the current folder that hide a module which workers need."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from elastrata.cli.main import run
from elastrata.driver.ray_session import ray_session
from elastrata.driver.shadowing import check_search_path
from elastrata_pipelines.errors import UserError
from support.shared_ray import close_ray
from support.texts import plain_text

HIDING = [
    *("torch.py", "queue.py", "types.py", "random.py", "numpy.py", "ray/__init__.py", "yaml.py"),
    *("elastrata_pipelines/__init__.py", "email/__init__.py", f"pyarrow{EXTENSION_SUFFIXES[0]}"),
]
HARMLESS = [
    *("mine.py", "data.py", "train.py", "build.py", "os.py", "sys.py", "torch/notes.txt"),
    *("queue.txt", "data/__init__.py", "2.py", "no module.py"),
]


def _write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")


@pytest.mark.parametrize("name", HIDING)
def test_a_module_that_hides_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    close_ray()  # a session of another test would be joined, without a check
    _write(tmp_path, name, *HARMLESS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught, ray_session():
        pass
    (line,) = caught.value.problems
    assert line.startswith(f"{tmp_path / name}: hides ")
    assert "rename it" in line


def test_other_files_and_folders_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, *HARMLESS)
    monkeypatch.chdir(tmp_path)
    check_search_path()
    # Nor a folder that the user has put into PYTHONPATH, a current folder that is gone, and the
    # home of the modules themselves.
    _write(tmp_path, "torch.py")
    monkeypatch.syspath_prepend("elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    check_search_path()
    monkeypatch.chdir(Path(subprocess.__file__).parent)
    check_search_path()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    check_search_path()


def test_all_are_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, "queue.py", "torch.py")
    (tmp_path / "text.txt").write_text(plain_text(0, 6000), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert run(["prepare", "--text", "text.txt", "--out", "data"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": hides ")[0] for line in lines] == [
        str(tmp_path / "queue.py"),
        str(tmp_path / "torch.py"),
    ]
    assert not (tmp_path / "data").exists()


def test_python_m_elastrata_starts_beside_such_files(tmp_path: Path) -> None:
    for name in ("queue.py", "typer.py", "torch.py"):
        (tmp_path / name).write_text("raise SystemExit(7)\n", encoding="utf-8")
    command = [sys.executable, "-m", "elastrata", "schema"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert (found.returncode, found.stderr) == (0, "")
