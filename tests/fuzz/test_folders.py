"""Folders that hold anything, were moved or copied, or are wanted by several commands at once: a
command uses what it knows, or refuses in a line and leaves everything as it was."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest

from elastrata.cli.main import run as run_here
from elastrata.run.claim import MARKERS, claim, folder_kind
from elastrata.run.export import _filled_whole
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format.manifest import MANIFEST, SHARDS
from elastrata_pipelines.preparation.target import Target
from elastrata_pipelines.storage import Storage
from support.lone_run import lone_run
from support.mutations import seeds

CASES = 50
NAMES = (
    *("run.json", "recipe.yaml", "driver.json", "history/0001-00000000.jsonl", "checkpoints/x/m"),
    *("sweep.yaml", "journal/0001-00000000.jsonl", "trials/0000/run.json", "report.html"),
    *("manifest.json", "shards/00000.parquet", "lengths.npy", ".building/begun", "tokenizer/t"),
    *("config.json", "model.safetensors", ".export-1/model/x", "README.md", "notes.txt", ".hidden"),
    *("run.json.0a1b2c3d.tmp", "tokenizer.json", "mlflow.db"),
)
READING = ("status x", "audit x", "export x --out y", "fork x --name y", "sweep --best x",
           "inspect x", "train --resume x", "generate x --prompt a", "evaluate x")  # fmt: skip
WRITING = ("export stem --out x", "prepare --text text --out x", "quickstart --out x")


@pytest.fixture(scope="module")
def stem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lone_run(tmp_path_factory.mktemp("folders"), "stem")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def scramble(folder: Path, stem: Path, draw: random.Random) -> None:
    """Fills a folder with a run, whole or in part, or with files of any kind, or with both."""
    if draw.random() < 0.5:
        shutil.copytree(stem, folder)
        for path in sorted(folder.iterdir()):
            if draw.random() < 0.3:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in draw.sample(NAMES, draw.randrange(5)):
        path = folder / name
        if not path.parent.is_file() and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(draw.choice(("", "{}", "a: 1\n")), encoding="utf-8")
    folder.mkdir(exist_ok=True)


@pytest.mark.parametrize("seed", seeds())
def test_a_folder_of_any_kind(
    seed: int, stem: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stem").symlink_to(stem)
    Path("text").mkdir()
    draw = random.Random(seed)
    for _ in range(CASES):
        shutil.rmtree("x", ignore_errors=True)
        scramble(Path("x"), stem, draw)
        kind = folder_kind(Storage("x"))
        before = contents(tmp_path)
        is_refused = kind not in ("nothing", "exported model", "other files")
        line = draw.choice(READING if kind != "run" or draw.random() < 0.5 else WRITING)
        if kind == "run" and line.split()[0] in ("fork", "train", "evaluate"):
            line = "status x"  # the others would train
        code = run_here(line.split())
        assert code in (0, 1, 2) if line.startswith("audit") else code in (0, 2), line
        if code == 2 or (is_refused and line in WRITING):
            assert code == 2, (line, kind)
            assert contents(tmp_path) == before, line
        shutil.rmtree("y", ignore_errors=True)


def _claimed(kind: str, folder: Path) -> AbstractContextManager[Any]:
    if kind == "data set":
        return Target(Storage(str(folder))).building()
    if kind == "exported model":
        return _filled_whole(folder)
    return claim(Storage(str(folder)), kind, lost=pytest.fail)  # type: ignore[arg-type]


def _fill(kind: str, folder: Path, given: Any) -> None:
    """Writes what makes a folder that kind."""
    if kind == "data set":
        (folder / SHARDS).mkdir(exist_ok=True)
        (folder / MANIFEST).write_text("{}", encoding="utf-8")
    elif kind == "exported model":
        given.mkdir()
        for name in ("config.json", "model.safetensors"):
            (given / name).write_text("{}", encoding="utf-8")
    else:
        (folder / MARKERS[kind]).write_text("{}", encoding="utf-8")  # type: ignore[index]


@pytest.mark.parametrize("seed", seeds())
def test_several_commands_at_once(seed: int, tmp_path: Path) -> None:
    """One at a time works in a folder, and what the first has made, no other kind changes."""
    draw = random.Random(seed)
    for case in range(CASES):
        folder = tmp_path / f"{case}"
        kinds = [draw.choice(("run", "sweep", "data set", "exported model")) for _ in range(3)]
        inside: list[str] = []
        wrong: list[BaseException | str] = []
        made: list[str] = []
        begin = Barrier(len(kinds))

        def command(
            kind: str,
            folder: Path = folder,
            begin: Barrier = begin,
            inside: list[str] = inside,
            wrong: list[BaseException | str] = wrong,
            made: list[str] = made,
        ) -> None:
            begin.wait()
            try:
                with _claimed(kind, folder) as given:
                    inside.append(kind)
                    if len(inside) > 1:
                        wrong.append(f"at once: {inside}")
                    _fill(kind, folder, given)
                    made.append(kind)
                    inside.remove(kind)
            except UserError:
                pass
            except BaseException as error:
                wrong.append(error)

        _run_all([lambda kind=kind: command(kind) for kind in kinds])  # type: ignore[misc]
        assert not wrong, (kinds, wrong)
        assert len(set(made)) == 1, (kinds, made)
        assert folder_kind(Storage(str(folder))) == made[0]


def _run_all(commands: list[Callable[[], None]]) -> None:
    threads = [Thread(target=one) for one in commands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
