"""All `--help` pages and more than 100 errors, compared with the text in `snapshots`.

A change of a message shows as a difference in `snapshots/help.txt` or `snapshots/errors.txt`. To
accept it, run

    ELASTRATA_UPDATE_SNAPSHOTS=1 python -m pytest -q tests/platform_/test_messages.py

and read the result with `git diff`. To add a case, add a line `$ elastrata ...` to `errors.txt`,
and run the same command. Commands run in a folder with the files of `FILES`, a data set `data`, a
copy `damaged` without one of its files, and a run `runs/run` without a checkpoint.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from elastrata.cli.main import app, run
from support.histories import started, stepped, write_run
from support.synthetic import write_data_set

SNAPSHOTS = Path(__file__).parent / "snapshots"
UPDATE = "ELASTRATA_UPDATE_SNAPSHOTS"
ADVICE = (
    f"is the new text meant? {UPDATE}=1 python -m pytest -q tests/platform_/test_messages.py "
    "writes it; read it with git diff"
)
PROMPT = "$ elastrata "
FEWEST_ERRORS = 100

MODEL = "workload: {name: bert, hidden_size: 32, num_layers: 1, num_heads: 2, max_positions: 64}\n"
GOOD = f"{MODEL}data: {{path: data}}\nsteps: 10\nbatch_size: 8\noptimizer: {{lr: 1e-3}}\n"
SWEEP = "recipe: bert/tiny\nchanges: {data.path: data}\n"
FILES = {
    "good.yaml": GOOD,
    "bad.yaml": "extends: good.yaml\nstepps: 5\nsteps: ten\nschedule: {shape: lin}\n"
    "workers: {gpus: some}\noptimizer: {lr: -1, betas: [0.9, 1]}\n",
    "torn.yaml": "steps: [1\nx: 2\n",
    "twice.yaml": "steps: 1\nseed: 2\nsteps: 3\n",
    "list.yaml": "- 1\n",
    "itself.yaml": "extends: itself.yaml\n",
    "no-base.yaml": "extends: nowhere.yaml\n",
    "empty.yaml": "",
    "latin.yaml": "name: \udce9\n",
    "bad-base.yaml": "extends: bad.yaml\nseed: x\n",
    "phases.yaml": f"{GOOD}phases: [{{steps: 5}}, {{steps: 5, optimizer: {{eps: 1e-3}}}}]\n",
    "sources.yaml": MODEL + "data: {path: x, sources: [{name: a, path: data, weight: 0},\n"
    "  {name: a, path: data, weight: 0}]}\nsteps: 9\nbatch_size: 8\noptimizer: {lr: 1e-3}\n",
    "sweep.yaml": SWEEP + "space: {optimizer.lr: {loguniform: [1e-4, 1e-2]}}\n",
    "bad-sweep.yaml": SWEEP + "metric: eval/los\nsearcher: {name: grid}\nspace:\n"
    "  optimizer.lrr: {loguniform: [1e-2, 1e-4], points: 3}\n"
    "  optimizer.eps: {loguniform: [0, 1e-4], points: 3}\n"
    "  optimizer.name: {choice: [adamw, lamb]}\n"
    "  workers.max: {int: [1, 2]}\n"
    "  optimizer.trust_max: {uniform: [1, 10], when: {optimizer.name: lam}}\n",
    "odd-sweep.yaml": SWEEP + "metrik: x\ntrials: 0\nspace: {optimizer.lr: {choise: [1]}}\n",
    "pbt.yaml": SWEEP + "scheduler: {name: pbt}\nsearcher: {name: grid}\ntrials: 1\n"
    "space: {workload.mask_probability: {uniform: [0.1, 0.2], points: 2}}\n",
    "cluster.yaml": "devices: 8\ndevice: {name: A1000-80GB}\n",
    "launcher.yaml": "provider: {type: aws}\nhead_node_type: hed\n"
    "available_node_types: {head: {resources: {CPU: 4}}}\n",
    "trace.csv": "0,join,8\n5,leave,some\n",
    "back.csv": "5,join,8\n0,lost,1\n",
    "lengths.json": '{"counts": [1, -2]}',
    "note.txt": "one line\n",
    "empty.txt": "",
    "other/file.txt": "not a run\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    write_data_set(tmp_path / "data", samples=200)
    write_data_set(tmp_path / "damaged", samples=200)
    (tmp_path / "damaged" / "lengths.npy").unlink()
    entries = [started(1, 0), stepped(1, 1), stepped(1, 2)]
    write_run(tmp_path / "runs" / "run", entries, data=tmp_path / "data")
    return tmp_path


def _print_help(command: typer.core.TyperCommand, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Print the page of a command and of those below it; yield a command line for each."""
    yield PROMPT + " ".join((*path, "--help"))
    assert run([*path, "--help"]) == 0
    for name, inner in getattr(command, "commands", {}).items():
        yield from _print_help(inner, (*path, name))


def _compare(name: str, shown: str) -> None:
    path = SNAPSHOTS / name
    if os.environ.get(UPDATE):
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8"), ADVICE


def test_every_help_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, signals_as_before: None
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    pages = []
    for line in _print_help(typer.main.get_command(app)):
        pages.append(capsys.readouterr().out)
        pages.append(f"{line}\n")
    pages.append(capsys.readouterr().out)
    stripped = (line.rstrip() for line in "".join(pages).splitlines())
    _compare("help.txt", "\n".join(stripped) + "\n")


def test_errors(folder: Path, capsys: pytest.CaptureFixture[str], signals_as_before: None) -> None:
    recorded = (SNAPSHOTS / "errors.txt").read_text(encoding="utf-8").splitlines()
    commands = [line for line in recorded if line.startswith(PROMPT)]
    assert len(set(commands)) == len(commands)
    blocks = []
    for line in commands:
        code = run(shlex.split(line.removeprefix(PROMPT)))
        printed = capsys.readouterr()
        assert code in (1, 2), line
        assert printed.err, line
        blocks.append(f"{line}\n{printed.out}{printed.err}")
    shown = "\n".join(blocks).replace(str(folder), "FOLDER")
    if "ray" in sys.modules:
        assert not sys.modules["ray"].is_initialized()
    _compare("errors.txt", shown)
    errors = {line for line in shown.splitlines() if line and not line.startswith(PROMPT)}
    assert len(errors) >= FEWEST_ERRORS
