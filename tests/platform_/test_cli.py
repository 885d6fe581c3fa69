"""The command line: codes, lines and JSON of what goes well and what does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.table import Table
from rich.text import Text

from elastrata.cli.main import run, run_command
from elastrata.terminal.console import (
    LiveBlock,
    escape_foreign_letters,
    open_console,
    print_error,
    print_json_line,
)
from elastrata_pipelines.errors import UserError
from support.synthetic import write_data_set


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data_set(folder, samples=400)
    return folder


@pytest.fixture(autouse=True)
def keep_signal_handler() -> Any:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def _json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["tran"], "No such command 'tran'. Did you mean 'train'? Try 'elastrata --help'."),
        (["status"], "Missing argument 'RUN'. Try 'elastrata status --help'."),
        (["train"], "expected a recipe, such as bert/tiny, or --resume RUN"),
        (["train", "bert/tiny", "--nome", "x"], "No such option: --nome"),
        (["train", "bert/tinny"], "bert/tinny: no such recipe (did you mean 'bert/tiny'?)"),
        (["train", "bert/tiny", "sed=1"], "command line: sed: 1: unknown key (did you mean 'seed"),
        (["train", "bert/tiny", "--name", "a/b"], "command line: name: 'a/b': expected letters"),
        (["prepare"], "expected a recipe, or --text PATH... --out DIR"),
        (["prepare", "--text", "x"], "--out: missing"),
        (
            ["prepare", "--text", "x", "--out", "y", "--seq-len", "3"],
            "command line: seq_len: 3: expected a whole number at least 8",
        ),
        (["inspect", "nowhere"], "no data set here (manifest.json is missing)"),
        (["runs", "http://127.0.0.1:9/runs"], "http://127.0.0.1:9/runs: cannot be read (Conn"),
        (["sweep", "--best", "http://127.0.0.1:9/s"], "http://127.0.0.1:9/s: cannot be read (Conn"),
        (["export", "nowhere", "--out", "x"], "no run here"),
        (["generate", "nowhere", "--prompt", "x"], "nowhere: no run here"),
        (["generate", "nowhere"], "expected --prompt TEXT to continue, or --file PATH"),
        (["bench", "setp"], "No such command 'setp'. Did you mean 'step'?"),
        (["bench", "step", "bert/tiny", "--lengths", "ful"], "--lengths: ful: expected data, full"),
        (["bench", "step", "bert/tiny", "--lengths", "data"], "no data set here"),
        (["bench", "step", "bert/tiny", "micro_batch_tokens=64"], "micro_batch_tokens: 64: expect"),
        (["bench", "step", "bert/lamb", "--phase", "2"], "--phase: 2: the recipe has 2 phases"),
        (["schema", "--out", "/proc/x"], "--out: /proc/x: cannot be written"),
    ],
)
def test_bad_input_is_told_in_one_line_and_as_json(
    arguments: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert line in printed.err
    assert run([*arguments, "--json"]) == 2
    result = _json(capsys)
    assert result["status"] == "error"
    assert result["errors"] == printed.err.splitlines()
    assert list(tmp_path.iterdir()) == []


def test_inspect(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(data), "--workers", "4", "--batch", "64", "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "all files are present and match their checksums" in shown
    assert "400 of at most 48 tokens" in shown
    assert "█" in shown
    assert run(["inspect", str(data), "--workers", "4", "--batch", "64", "--json"]) == 0
    result = _json(capsys)
    assert (result["samples"], result["stripes"], result["shards"]) == (400, 13, 7)
    assert 0 <= result["padding_fraction"] < result["padding_to_seq_len"] < 1
    assert 1 <= result["imbalance_max_over_mean"] < result["balance"]["imbalance_random"]
    assert result["verified"] is False


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--workers", "8,x"], "--workers: 8,x: expected numbers from 1 to 65,536, such as 8"),
        (["--workers", "0"], "--workers: 0: expected numbers from 1 to 65,536"),
        (["--workers", "-3"], "--workers: -3: expected numbers from 1 to 65,536"),
        (["--workers", "65537"], "--workers: 65537: expected numbers from 1 to 65,536"),
        (["--workers", "8", "--plot", "a.png"], "--plot: expected several numbers of workers"),
        (["--workers", "8,9", "--plot", "a.pdf"], "--plot: a.pdf: expected the name of a .png"),
        (["--ranks-per-node", "0"], "--ranks-per-node"),
        (["batch_size=4"], "batch_size=4: unexpected: "),
    ],
)
def test_inspect_refuses_nonsense(
    data: Path, options: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(data), *options]) == 2
    shown = capsys.readouterr()
    assert line in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_inspect_shows_the_parameter_groups_of_a_recipe(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("extends: bert/tiny\noptimizer: {name: muon}\n", encoding="utf-8")
    assert run(["inspect", str(recipe)]) == 0
    shown = capsys.readouterr().out
    assert "bert.encoder.layer.*.attention.self.query.weight [128, 128] x 2" in shown
    assert "30,522 ids, as configured in data.prepare" in shown
    recipe.write_text(
        f"extends: bert/tiny\ndata: {{path: '{data}'}}\noptimizer: {{name: lamb}}\n",
        encoding="utf-8",
    )
    assert run(["inspect", str(recipe), "--json"]) == 0
    result = _json(capsys)["model"]
    assert (result["vocabulary"], result["prepared"]) == (97, True)
    assert [group["rule"] for group in result["groups"]] == ["LAMB", "LAMB"]
    assert [group["weight_decay"] for group in result["groups"]] == [0.01, 0.0]
    assert result["parameters"] == sum(group["parameters"] for group in result["groups"])
    recipe.write_text("extends: bert/tiny\ndata: {prepare: null}\n", encoding="utf-8")
    assert run(["inspect", str(recipe)]) == 2
    assert "no data set here; its tokenizer" in capsys.readouterr().err


def test_inspect_tells_of_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data_set(tmp_path, samples=100)
    shard = next((tmp_path / "shards").iterdir())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert run(["inspect", str(tmp_path), "--verify"]) == 2
    assert f"{shard}: altered" in capsys.readouterr().err
    assert run(["inspect", str(tmp_path), "--batch", "101"]) == 2
    assert "a batch of 101 is larger than the data set" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "key"), [("sweep", "space"), ("cluster", "devices")])
def test_schema_of_other_files(kind: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", kind]) == 0
    shown = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(shown)
    whole = shown.get("$defs", {}).get("Sweep", shown)  # one that extends no other
    for form in whole.get("anyOf", [whole]):
        assert form["properties"][key]["description"]
    assert run(["schema", kind, "--keys"]) == 2
    assert f"--keys: not allowed with {kind}" in capsys.readouterr().err


def test_a_failure_is_one_line_and_the_rest_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        error = RuntimeError("first line\nsecond line")
        error.add_note("logs: here")
        raise error

    assert run_command(fail, as_json=True, with_traceback=False) == 1
    printed = capsys.readouterr()
    lines = ["RuntimeError: first line (--traceback shows all)", "logs: here"]
    assert printed.err.splitlines() == lines
    assert json.loads(printed.out) == {"status": "error", "errors": lines}
    assert run_command(fail, as_json=False, with_traceback=True) == 1
    assert "Traceback" in capsys.readouterr().err


def test_many_and_long_lines_are_cut_in_a_terminal_and_whole_as_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    problems = [f"shard {number} is missing" for number in range(20_000)] + ["x" * 3000]

    def fail() -> None:
        raise UserError(*reversed(problems))

    assert run_command(fail, as_json=True, with_traceback=False) == 2
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert (len(lines), len(lines[0])) == (51, 1003)
    assert lines[-1] == "and 19,951 more; --json shows all"
    assert len(json.loads(printed.out)["errors"]) == 20_001


def test_a_termination_is_an_interrupt() -> None:
    def terminate() -> None:
        signal.raise_signal(signal.SIGTERM)

    assert run(["--help"]) == 0
    assert run_command(terminate, as_json=False, with_traceback=False) == 130


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "gbk", "utf-8"])
def test_letters_that_the_terminal_has_not_are_escaped(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names hold any letter, and files' names bytes that are none: told, whatever the locale."""
    name, written = "größe 数 \udce9", BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, encoding=encoding))
    escape_foreign_letters()
    table = Table(title=name)
    table.add_column(name)
    open_console(as_json=False).print(table, name)
    print_json_line({"name": name})
    *shown, last = written.getvalue().decode(encoding).splitlines()
    assert json.loads(last) == {"name": name}
    assert sum("gr" in line and "\\udce9" in line for line in shown) == 3


HOSTILE = "a\x1b[2Jb\x9bc\x07d\u202ee\rf"


@pytest.mark.parametrize("kind", ["text", "table", "table of Text", "error"])
def test_control_characters_never_reach_a_terminal(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table()
    table.add_column(HOSTILE)
    table.add_row(Text(HOSTILE) if kind == "table of Text" else HOSTILE)
    if kind == "error":
        print_error(HOSTILE)
    else:
        open_console(as_json=False).print(HOSTILE if kind == "text" else table, markup=False)
    out, err = capsys.readouterr()
    shown = out + err
    assert not set("\x1b\x9b\x07\u202e\r") & set(shown)
    assert r"a\x1b[2Jb\x9bc\x07d\u202ee\rf" in shown


def test_a_live_view_keeps_its_own_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with LiveBlock(open_console(as_json=False)) as block:
        block._write(HOSTILE)
    assert "\x1b[?25l" in written.getvalue()
    assert r"a\x1b[2Jb" in written.getvalue()


@pytest.mark.parametrize("arguments", ["runs --json", "status x --json", "schema", "--version"])
@pytest.mark.parametrize("stream", [">/dev/full", ">&-", "| exec <&-", "2>&-", "2>/dev/full"])
def test_a_stream_that_takes_nothing_is_told_in_one_line(
    arguments: str, stream: str, tmp_path: Path
) -> None:
    """Also with another stream that is closed, in a terminal without Unicode."""
    unbuffered = "1" if "runs" in arguments else ""
    mistake = "no run here" if arguments.startswith("status") else ""
    command = f"'{sys.executable}' -m elastrata {arguments} <&- {stream}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        encoding="ascii",
    )
    lines = [line for line in done.stderr.splitlines() if "no runs here" not in line]
    if stream.startswith("2") or (stream == ">&-" and not mistake):
        assert (done.returncode, lines) == (2 if mistake else 0, [])
    elif mistake:
        (line,) = lines
        assert (done.returncode, mistake in line) == (2, True)
    elif stream.startswith("|"):  # as `head` ends
        assert (done.returncode, lines) == (1, [])
    else:
        (line,) = lines
        assert (done.returncode, line[:34]) == (1, "standard output: cannot be written")


LATE_SIGNAL = """
import os, signal, sys, threading, time
from importlib.abc import MetaPathFinder

class Finder(MetaPathFinder):  # in the middle of the imports
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.{name})

sys.meta_path.insert(0, Finder())
sys.argv = ["elastrata", "runs", "--json"]
from elastrata.__main__ import main
main()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("module", ["typer", "rich.console", "pydantic", "elastrata.run.claim"])
def test_a_signal_during_the_imports_is_an_interrupt(module: str, name: str) -> None:
    code = LATE_SIGNAL.format(module=module, name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert json.loads(done.stdout) == {"status": "error", "errors": ["interrupted"]}


def test_a_deleted_current_folder_is_told(tmp_path: Path) -> None:
    command = f"mkdir gone && cd gone && rmdir ../gone && '{sys.executable}' -m elastrata runs"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, encoding="utf-8"
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("the current folder: No such file or directory: it was deleted")
