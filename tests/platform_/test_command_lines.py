"""Every command line of README and docs is run as it stands there, or says why not."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from elastrata.cli.main import app, run
from elastrata.driver.ray_session import ray_session
from elastrata.recipe.file import load_recipe
from elastrata.recipe.yaml_reader import available_recipes
from elastrata.sweeps.result import find_sweep
from elastrata_pipelines.errors import format_command, pluralize
from support.command_lines import NOT_RUN, READING, TO_A_BERT, TRAINING
from support.documented import ROOT, TUTORIAL, documented_lines, documented_names
from support.texts import plain_text

BIN = Path(sys.executable).parent
ELSEWHERE = {
    line
    for line in documented_lines()
    if line.startswith(("python3 -c", "jupytext"))
    or (line in documented_lines([TUTORIAL]) and line not in {**TO_A_BERT, **READING, **TRAINING})
}
"""Run by a shell: by a test below, or by tests/e2e/test_tutorial.py."""
PHASES = """
extends: bert/tiny
data: {path: data/mine, prepare: {sources: [{paths: my/texts}]}}
batch_size: 32
phases: [{}, {steps: 5, batch_size: 16}]
"""
SMALL_SWEEP = {
    "steps: 2000": "steps: 6",
    "schedule.warmup_steps: 100": "schedule.warmup_steps: 1",
    "evaluation.every: 100": (
        "evaluation.every: 2\n  batch_size: 8\n  workload.num_layers: 1\n  evaluation.samples: 16\n"
        "  workers.threads: 1"
    ),
    "int: [0, 400]": "int: [0, 3]",
}
"""What makes the sweep of the page small."""


@pytest.mark.parametrize(
    "word",
    ["plain", "a b", "it's", 'a"b', "$HOME", "a;b&c|d", "*?", "~x", "", "a\nb", "\x1b[1m'", "é\\n"],
)
def test_a_printed_command_is_read_by_a_shell_as_it_was_meant(word: str) -> None:
    command = format_command("printf", r"%s\0", word, "end")
    assert command.isprintable()
    found = subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout
    assert found.decode() == f"{word}\0end\0"


def test_no_message_puts_a_value_into_a_command_without_quotes() -> None:
    unquoted = [
        f"{path}:{node.lineno}"
        for folder in ("platform", "pipelines", "workloads")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.JoinedStr)
        for part, value in itertools.pairwise(node.values)
        if isinstance(value, ast.FormattedValue) and isinstance(part, ast.Constant)
        if re.search(r"\b(elastrata|mlflow|ray) [a-z]+ ([\w.-]+ )*$", str(part.value))
    ]
    assert unquoted == []


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "step", "1 step"),
        (0, "step", "0 steps"),
        (1024, "step", "1,024 steps"),
        (1, "batch", "1 batch"),
        (2, "batch", "2 batches"),
        (2, "loss", "2 losses"),
        ("auto", "worker", "auto workers"),
    ],
)
def test_a_count_agrees_with_its_noun(count: int | str, noun: str, text: str) -> None:
    assert pluralize(count, noun) == text


def test_no_command_prints_a_plural_after_a_count_that_may_be_one() -> None:
    nouns = "steps|samples|tokens|workers|shards|stripes|files|nodes|trials|faults|checkpoints"
    plurals = [
        f"{path}:{node.lineno}"
        for folder in ("cli", "driver", "run", "terminal")
        for path in sorted((ROOT / "platform" / "elastrata" / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.JoinedStr)
        for value, part in itertools.pairwise(node.values)
        if isinstance(value, ast.FormattedValue) and isinstance(part, ast.Constant)
        if re.match(rf" ({nouns})\b(?! per|/)", str(part.value))
    ]
    assert plurals == []


def test_a_command_that_a_command_prints_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "it's mine; [b].yaml"
    recipe.write_text("extends: bert/tiny\nname: x\ndata: {path: none}\n", encoding="utf-8")
    assert run(["inspect", recipe.name, "steps=3"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "here yet: " in line)
    assert shlex.split(line.partition("here yet: ")[2]) == ["elastrata", "prepare", recipe.name]


def _yaml(document: str, number: int = 0) -> str:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[number]


def _write_files(home: Path) -> None:
    """What the lines of the documents find in a folder: texts, and the files that they show."""
    texts = home / "my" / "texts"
    texts.mkdir(parents=True)
    for number in range(400):  # of so many a hundredth is some, whichever is held out
        (texts / f"{number}.txt").write_text(plain_text(number, 600), encoding="utf-8")
    lines = [json.dumps({"content": plain_text(number, 600)}) for number in range(400)]
    (home / "web.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (home / "mine.yaml").write_text(_yaml("README.md"), encoding="utf-8")
    (home / "phases.yaml").write_text(PHASES, encoding="utf-8")
    (home / "cluster.yaml").write_text(_yaml("docs/explanation/planner.md"), encoding="utf-8")
    sweep = _yaml("docs/how-to/sweeps.md")
    for there, here in SMALL_SWEEP.items():
        assert there in sweep
        sweep = sweep.replace(there, here)
    (home / "lr.yaml").write_text(sweep, encoding="utf-8")
    (home / "cluster_configs").symlink_to(ROOT / "cluster_configs")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which README's first lines were run: a data set, a run and an export."""
    home = tmp_path_factory.mktemp("home")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    _write_files(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        with ray_session("local", num_cpus=2):
            for line, how in TO_A_BERT.items():
                assert run(how.arguments(line)) == 0, line
        yield home
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_every_line_is_run_or_says_why_not() -> None:
    tables: list[Sequence[str]] = [[*TO_A_BERT], [*READING], [*TRAINING], [*NOT_RUN], [*ELSEWHERE]]
    known = [line for table in tables for line in table]
    assert sorted(known) == sorted(documented_lines())


def test_every_command_that_is_named_exists() -> None:
    named = {name for name in documented_names() if name.startswith("elastrata ")}
    assert len(named) > 10
    for name in named:
        words = name.removesuffix(" --json").split()[1:]
        _, left = _command(words)
        assert left in ([], ["cluster"]), name  # the only argument: `schema cluster`


def _command(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that words name, and what is left of them."""
    command, left = typer.main.get_command(app), list(words)
    while left and left[0] in getattr(command, "commands", {}):
        command = command.commands[left.pop(0)]  # type: ignore[attr-defined]
    return command, left


def _exists(name: str) -> bool:
    return (ROOT / name).exists()


@pytest.mark.parametrize("line", NOT_RUN)
def test_what_is_not_run_is_at_least_right(line: str) -> None:
    program, *words = shlex.split(line)
    if program == "elastrata":
        _check_elastrata(words)
    elif program == "make":
        targets = re.findall(
            r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
        assert {word for word in words if "=" not in word} <= set(targets)
    elif program == "python":
        assert _exists(words[0])
    elif program == "ray":
        _check_ray(words)
    elif program == "mlflow":
        ours = (ROOT / "tests" / "support" / "tracking_server.py").read_text(encoding="utf-8")
        assert all(f'"{word}"' in ours for word in words if word.startswith("--"))
    elif "install" in words:
        _check_install(words)
    else:
        assert program == "export"
        assert all("=" in word for word in words)


def _check_elastrata(words: list[str]) -> None:
    """Its options exist, and a recipe that ships takes the overrides."""
    command, left = _command(words)
    if "..." in left:
        left[left.index("...")] = "RECIPE"
    values = command.make_context(command.name, left).params
    if values.get("recipe") in available_recipes():
        load_recipe(values["recipe"], values["overrides"] or [])


def _check_ray(words: list[str]) -> None:
    from ray.scripts.scripts import cli

    command, left = cli, words
    while left[0] in getattr(command, "commands", {}):
        command = command.commands[left.pop(0)]
    command.make_context("ray", left)


def _check_install(words: Sequence[str]) -> None:
    """What it installs from this folder is there."""
    if "-c" in words:
        assert _exists(words[words.index("-c") + 1])
    if "-e" in words:
        folder, _, extra = words[words.index("-e") + 1].partition("[")
        project = ROOT / folder / "pyproject.toml"
        assert not extra or re.search(
            rf"^{extra.removesuffix(']')} = \[", project.read_text(encoding="utf-8"), re.MULTILINE
        )


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.matrix if " rehearse " in line else ())
        for line in READING
    ],
)
def test_a_line_that_reads(line: str, home: Path) -> None:
    assert run(READING[line].arguments(line)) == 0


def test_a_checkpoint_is_checked_by_hand_as_the_page_says(home: Path) -> None:
    (line,) = (line for line in ELSEWHERE if line.startswith("python3 -c"))
    newest = max((home / "runs" / "first" / "checkpoints").iterdir())
    variables = {"PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}", "LC_ALL": "C"}
    environment = {**os.environ, **variables}  # our Python; "OK" in English
    done = subprocess.run(
        line, shell=True, cwd=newest, env=environment, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    assert "__0_0.distcp: OK" in done.stdout


@pytest.mark.matrix  # a process of its own
def test_a_notebook_is_made_as_it_says(tmp_path: Path) -> None:
    (line,) = (line for line in ELSEWHERE if line.startswith("jupytext"))
    shutil.copy(ROOT / "workloads" / "notebooks" / "sweep.py", tmp_path)
    subprocess.run([BIN / "jupytext", *line.split()[1:]], cwd=tmp_path, check=True)
    assert json.loads((tmp_path / "sweep.ipynb").read_text(encoding="utf-8"))["cells"]


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_the_lines_that_train(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = {}
    shown = ""
    with ray_session("local", num_cpus=2):
        for line, how in TRAINING.items():
            arguments = how.arguments(line)
            if "runs/lr/trials/0007" in arguments:
                best = find_sweep("lr").best
                assert best is not None
                arguments[1] = f"runs/lr/trials/{best.id}"
            code, told = run(arguments), capsys.readouterr()
            shown += told.out
            if code != 0:
                failed[line] = told.err
    assert failed == {}
    assert "Once upon a time" in shown
    for model in ("models/best", "models/registered", "quick/gpt-model"):
        assert (home / model / "config.json").is_file()
