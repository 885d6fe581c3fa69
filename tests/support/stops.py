"""Every command under every condition that can end it: how it is run, and how it must end.

`python tests/support/stops.py` writes `docs/reference/exit-codes.md` from these tables, to which
`tests/fuzz/test_stops.py` holds the commands.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "exit-codes.md"
_SECONDS = 500.0
_COMMAND = [sys.executable, "-m", "elastrata"]
_AT_MOMENT = Path(__file__).with_name("at_moment")
_KEYS = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "HF_TOKEN": "none"}
"""Of servers that never ask for them."""
_OWN_DISK = 'mount -t tmpfs -o size={size} none "$0" && cp -a . "$0" && cd "$0" && {then} exec "$@"'
"""A shell's line: makes a disk of the command's own, with a copy of its folder."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A command line for the folder of `make_home`; its words may name a server:
    `{server}`, its URL, or `{host}`, its host and port.

    The moments are those of `at_moment`, or a pattern of what the command prints.
    """

    local: str = ""
    """Succeeds without anything outside the folder; empty: there is no such line."""
    server: str = ""
    """Asks a server; empty: the command never does."""
    signalled: str = ""
    """The line for signals. Default: `local`, else `server`."""
    start: str = "import:pydantic"
    """The moment when the command has read its arguments."""
    work: str = "socket.connect:"
    """The moment in the middle of its work."""
    uses_ray: bool = False


_RAY = "subprocess.Popen:gcs_server"
LINES = {
    "quickstart": Line(
        local="quickstart steps=20 schedule.warmup_steps=1 --out out/q",
        server="quickstart tracking.uri={server} --out out/q",
        start=_RAY,
        work="line:^2/5",
        uses_ray=True,
    ),
    "prepare": Line(
        local="prepare --text texts --vocab-size 300 --out out/data",
        server="prepare --text {server}/text.txt --out out/data",
        start=_RAY,
        work="line:tokenizer",
        uses_ray=True,
    ),
    "inspect": Line(
        local="inspect data --workers 2,4 --plot out/balance.png",
        server="inspect s3://bucket/data",
        work="open:lengths",
    ),
    "plan": Line(
        local="plan gpt/tiny --cluster 8xT4 --write out/planned.yaml",
        work="import:elastrata.planner.plan",
    ),
    "rehearse": Line(
        local="rehearse bert/tiny --cluster 2xT4 --no-graphs", work="line:^rehearsing"
    ),
    "simulate": Line(
        local="simulate gpt/tiny --cluster 8xT4 --step-seconds 1 --plot out/workers.png",
        work="import:elastrata.simulation.simulate",
    ),
    "train": Line(
        local="train recipe.yaml storage=out --name new",
        server="train recipe.yaml storage=s3://bucket/runs --name new",
        start=_RAY,
        work="line:^step ",
        uses_ray=True,
    ),
    "fork": Line(
        local="fork run --name new storage=out steps=40",
        server="fork s3://bucket/runs/run --name new steps=40",
        start=_RAY,
        work="line:^step ",
        uses_ray=True,
    ),
    "sweep": Line(
        local="sweep sweep.yaml storage=out",
        server="sweep sweep.yaml storage=s3://bucket/runs",
        start=_RAY,
        work="line:0000",
        uses_ray=True,
    ),
    "submit": Line(server="submit recipe.yaml --cluster {server} storage=s3://bucket/runs"),
    "runs": Line(local="runs", server="runs s3://bucket/runs", work="open:history"),
    "status": Line(local="status run", server="status s3://bucket/runs/run", work="open:history"),
    "stop": Line(server="stop run --cluster {server}"),
    "audit": Line(local="audit run", server="audit s3://bucket/runs/run", work="open:history"),
    "export": Line(
        local="export run --out out/model",
        server="export run --out out/model --push owner/name",
        work="open:.distcp",
    ),
    "generate": Line(
        local="generate model --prompt Some --tokens 2",
        server="generate s3://bucket/runs/run --prompt Some",
        work="open:tokenizer.json",
    ),
    "evaluate": Line(
        local="evaluate model --tasks fire_or_ice --include tasks",
        server="evaluate s3://bucket/runs/run --tasks fire_or_ice --include tasks",
        start="import:lm_eval",
        work="open:fire_or_ice",
    ),
    "doctor": Line(
        local="doctor --cluster gcp",
        server="doctor --storage s3://bucket/runs",
        signalled="doctor",
        start=_RAY,
        work="line:.",
        uses_ray=True,
    ),
    "guard": Line(
        server="guard --now 1 --address {host}",
        signalled="guard --cloud aws --metadata {server}",
    ),
    "schema": Line(local="schema --out out/schema.json", work="import:elastrata.recipe.schema"),
    "bench": Line(
        local="bench step recipe.yaml --steps 3 --warm-up 0",
        server="bench step recipe.yaml data.path=s3://bucket/data",
        work="line:samples a step",
    ),
}
"""By command."""

SIGNALS = {
    f"{name} {when}": (number, when)
    for name, number in (("SIGINT", signal.SIGINT), ("SIGTERM", signal.SIGTERM))
    for when in ("at imports", "at start", "at work")
}
ASKING = ("no network", "dead server")
WRITING = ("full disk", "read-only place")
CONDITIONS = (
    *ASKING,
    *WRITING,
    "closed stdout",
    "reader gone",
    *SIGNALS,
    "foreign locale",
)


CASES = [
    (command, condition)
    for command, line in LINES.items()
    for condition in CONDITIONS
    if line.local or condition in SIGNALS or condition in ASKING
]
"""What is tried; `submit`, `stop` and `guard` do nothing without a cluster."""


@dataclass(frozen=True)
class Outcome:
    """How a command must end: its exit code and the last line of standard error.

    Words in capitals stand for any text.
    """

    code: int
    line: str = ""


_SUCCESS = Outcome(0)
_INTERRUPTED = Outcome(130, "interrupted")
_OUTCOMES = {
    "no network": Outcome(2, "PLACE: cannot be read (REASON)"),
    "dead server": Outcome(2, "PLACE: cannot be read (REASON)"),
    "full disk": Outcome(2, "PLACE: cannot be written (No space left REASON)"),
    "read-only place": Outcome(2, "PLACE: cannot be written (Read-only file system)"),
    "closed stdout": _SUCCESS,
    "reader gone": Outcome(1),
    **dict.fromkeys(SIGNALS, _INTERRUPTED),
    "foreign locale": _SUCCESS,
}
"""By condition, of the commands that it concerns: those that ask a server, write, or are ended."""
_UNREAD = "s3://bucket/data: no data set can be read there (REASON)"
_NO_SERVER = "--cluster: ADDRESS: no job server answers there (REASON)"
_ASKING_LINES = {
    "inspect": _UNREAD,
    "bench": _UNREAD,
    "submit": _NO_SERVER,
    "stop": _NO_SERVER,
    "train": "storage: PLACE: cannot be written (REASON)",
    "export": "--push: owner/name: ADDRESS: cannot be reached (REASON)",
}
_LOCALE = "PLACE: the current folder's name is not ascii; set PYTHONUTF8=1"
_SPECIAL = {
    **{
        (command, condition): Outcome(2, line)
        for command, line in _ASKING_LINES.items()
        for condition in ASKING
    },
    **{
        ("guard", one): Outcome(1, "TIME this machine is to be stopped; not drained: REASON")
        for one in ASKING
    },
    **{("doctor", one): Outcome(1) for one in ASKING},
    **{
        (command, "foreign locale"): Outcome(2, _LOCALE)
        for command in ("prepare", "train", "fork", "sweep")
    },
    ("quickstart", "foreign locale"): Outcome(2, "command line: storage: REASON"),
    ("evaluate", "full disk"): Outcome(2, "--tasks: NAME: Not enough disk space. REASON"),
    ("evaluate", "read-only place"): Outcome(2, "--tasks: NAME: REASON"),
    ("guard", "SIGTERM at work"): _SUCCESS,
}
"""Of single cases."""


def expected(command: str, condition: str) -> Outcome:
    """Return how a command must end under a condition."""
    line = LINES[command]
    is_concerned = {
        **dict.fromkeys(ASKING, bool(line.server)),
        **dict.fromkeys(WRITING, " out" in line.local or "=out" in line.local),
    }
    general = _OUTCOMES[condition] if is_concerned.get(condition, True) else _SUCCESS
    return _SPECIAL.get((command, condition), general)


def is_json(command: str, condition: str) -> bool:
    """Return whether a case is run with `--json`: where SIGTERM ends a command that has it."""
    return condition.startswith("SIGTERM") and command != "guard"


def matches(line: str, text: str) -> bool:
    """Return whether `text` is a line of an outcome."""
    return bool(re.fullmatch(re.sub(r"[A-Z]{4,}", ".+", re.escape(line)), text))


@dataclass(frozen=True)
class Ended:
    """How a command has ended: lines with the seconds after which they came."""

    code: int
    out: list[tuple[float, str]]
    err: list[tuple[float, str]]
    seconds: float

    @property
    def first_seconds(self) -> float:
        return min((seconds for seconds, _ in (*self.out, *self.err)), default=float("nan"))


def make_home(folder: Path) -> None:
    """Write what the lines find: texts, a data set, a finished run, its export, and recipes."""
    import json

    import yaml

    from elastrata.cli.main import run
    from support.small_gpt import GPT, run_with_tokenizer
    from support.synthetic import tiny_recipe
    from support.texts import plain_text

    run_with_tokenizer(folder)
    with chdir(folder):
        assert run(["export", "run", "--out", "model"]) == 0
    for name in ("texts", "tasks", "out"):
        (folder / name).mkdir()
    for number in range(200):
        (folder / "texts" / f"{number}.txt").write_text(plain_text(number, 600), encoding="utf-8")
    recipe = tiny_recipe("data", "runs", steps=20, workload=GPT)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    sweep = {
        "name": "lr",
        "recipe": "recipe.yaml",
        "space": {"optimizer.lr": {"loguniform": [1e-4, 1e-2]}},
        "trials": 2,
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep), encoding="utf-8")
    question = {"question": "The world ends in", "choices": ["fire", "ice"], "answer": 0}
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n", encoding="utf-8")
    task = {
        "task": "fire_or_ice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}, "cache_dir": "cache"},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "tasks" / "fire_or_ice.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def missing_means(condition: str) -> str:
    """Return what this machine lacks to make a condition; empty if it lacks nothing."""
    if condition not in (*WRITING, "no network"):
        return ""
    kind, tool = ("-rn", "ip link") if condition == "no network" else ("-rm", "mount")
    tried = subprocess.run(
        ["unshare", kind, *tool.split()], capture_output=True, encoding="utf-8", check=False
    )
    return tried.stderr.strip() or f"`unshare {kind}` fails" if tried.returncode else ""


def run_under(condition: str, command: str, home: Path, scratch: Path) -> Ended:
    """Run a command's line under a condition, in a copy of `home`, to its end."""
    line = LINES[command]
    # A letter that an ASCII terminal lacks.
    place = scratch / ("m\N{LATIN SMALL LETTER E WITH ACUTE}" if "locale" in condition else "me")
    disk = scratch / "disk"
    shutil.copytree(home, place)
    disk.mkdir()
    prefix, variables = _surroundings(condition, line, disk)
    texts = (line.server, line.local) if condition in ASKING else (line.local, line.server)
    text = (condition in SIGNALS and line.signalled) or next(filter(None, texts))
    send = None
    if condition in SIGNALS and "ELASTRATA_TEST_SIGNAL" not in variables:
        send = SIGNALS[condition][0], re.compile(line.work.removeprefix("line:"))
    with ExitStack() as stack:
        host = "head.example:8265"
        if condition != "no network":
            host = stack.enter_context(_dead_server())
            variables |= {"AWS_ENDPOINT_URL": f"http://{host}", "HF_ENDPOINT": f"http://{host}"}
        words = text.format(server=f"http://{host}", host=host).split()
        if is_json(command, condition):
            words.append("--json")
        return _run(
            [*prefix, *_COMMAND, *words],
            place,
            variables,
            send,
            reader_gone=condition == "reader gone",
        )


def _surroundings(condition: str, line: Line, disk: Path) -> tuple[list[str], dict[str, str]]:
    """Return the words before a command line, and the variables, that make a condition."""
    if condition == "no network":
        return ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"], {}
    if condition in WRITING:
        full = condition == "full disk"
        then = "head -c 1G /dev/zero > filler 2>&-;" if full else 'mount -o remount,ro "$0" &&'
        shell = _OWN_DISK.format(size="64m", then=then)
        return ["unshare", "-rm", "sh", "-c", shell, str(disk)], {}
    if condition == "closed stdout":
        return ["sh", "-c", 'exec "$@" >&-', "sh"], {}
    if condition == "foreign locale":
        # Python would make UTF-8 of the locale C by itself.
        return [], {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if condition in SIGNALS:
        number, when = SIGNALS[condition]
        moment = {"at imports": "import:typer", "at start": line.start, "at work": line.work}[when]
        if not moment.startswith("line:"):
            return [], {"ELASTRATA_TEST_SIGNAL": f"{int(number)}:{moment}"}
    return [], {}


@contextmanager
def _dead_server() -> Iterator[str]:
    """Serve nothing: the system takes connections, and nothing answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def _run(
    words: list[str],
    place: Path,
    variables: Mapping[str, str],
    send: tuple[signal.Signals, re.Pattern[str]] | None,
    *,
    reader_gone: bool,
) -> Ended:
    path = os.pathsep.join([str(_AT_MOMENT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **_KEYS, "HOME": str(place), "PYTHONPATH": path, **variables}
    began = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=place,
        env=environment,
        stdout=_readerless() if reader_gone else subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="backslashreplace",
        start_new_session=True,
    )
    sent: list[int] = []

    def read(stream: IO[str], lines: list[tuple[float, str]]) -> None:
        with stream:
            for text in stream:
                lines.append((time.monotonic() - began, text.rstrip("\n")))
                if send and not sent and send[1].search(text):
                    sent.append(send[0])
                    process.send_signal(send[0])

    out: list[tuple[float, str]] = []
    err: list[tuple[float, str]] = []
    streams = [(stream, lines) for stream, lines in ((process.stdout, out), (process.stderr, err))]
    readers = [threading.Thread(target=read, args=pair) for pair in streams if pair[0]]
    for reader in readers:
        reader.start()
    try:
        code = process.wait(_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for reader in readers:
        reader.join()
    return Ended(code, out, err, time.monotonic() - began)


def _readerless() -> int:
    """Return the end of a pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


_CODES = {
    0: "success",
    1: "failure, or, of `doctor` and `audit`, a problem found; `--traceback` prints the traceback",
    2: "invalid input, a server that does not answer, or a place that cannot be written to: one "
    "line per mistake, and nothing is left half-written",
    130: "interrupted by SIGINT (Ctrl-C) or SIGTERM",
}
_SIGNALS = {
    "SIGINT (Ctrl-C), SIGTERM": "The command cleans up, prints `interrupted` and exits with 130. "
    "`train`, `fork` and `sweep` save a checkpoint first, from which the same command resumes.",
    "the same again": "The command exits at once, with 130; the newest checkpoint remains.",
    "SIGTERM to `guard`": "With `--on-sigterm`, the notice for which it waits; else it exits with "
    "0.",
    "SIGKILL": "A shell reports 137. The same command resumes a run from its newest checkpoint.",
}
_MEANINGS = {
    "no network": "the machine has no network",
    "dead server": "a server accepts the connection and never answers",
    "full disk": "the disk of the current folder is full",
    "read-only place": "the current folder cannot be written to",
    "closed stdout": "standard output is closed (`>&-`)",
    "reader gone": "the reader of standard output has closed the pipe, as `head` does",
    "SIGINT, SIGTERM": "while Python imports, when the command starts, or in its work",
    "foreign locale": "the terminal has only ASCII, and the folder's name other letters",
}


def page() -> str:
    """Return the page of exit codes and signals."""
    columns = {title: [title] for title in CONDITIONS if title not in SIGNALS}
    columns |= {"SIGINT, SIGTERM": [*SIGNALS]}
    columns = {title: columns[title] for title in _MEANINGS}
    lines: dict[tuple[str, Outcome], list[str]] = {}
    rows = []
    for command in LINES:
        cells = []
        for title, conditions in columns.items():
            tried = [expected(command, one) for one in conditions if (command, one) in CASES]
            cells.append(", ".join(dict.fromkeys(str(outcome.code) for outcome in tried)) or "-")
            for outcome in dict.fromkeys(tried):
                if outcome.line:
                    lines.setdefault((title, outcome), []).append(command)
        rows.append([f"`{command}`", *cells])
    said = [
        [title, str(outcome.code), f"`{outcome.line}`", _spell(commands)]
        for (title, outcome), commands in sorted(
            lines.items(), key=lambda item: [*columns].index(item[0][0])
        )
    ]
    codes = [
        [str(code), text, next((_name(case) for case in CASES if expected(*case).code == code), "")]
        for code, text in _CODES.items()
    ]
    return f"""\
# Exit codes and signals

This page is generated by `tests/support/stops.py`; `tests/fuzz/test_stops.py` runs all its cases.

## Exit codes

{_table(["code", "meaning", "example"], codes)}

## Signals

{_table(["signal", "effect"], [[*row] for row in _SIGNALS.items()])}

## By command

The table of commands holds their exit codes. A command that does not succeed prints at most three
lines on standard error, never a traceback. A command that waits for a server says so meanwhile.

{_table(["condition", "meaning"], [[*row] for row in _MEANINGS.items()])}

{_table(["command", *columns], rows)}

## Last line of standard error

Words in capitals stand for any text.

{_table(["condition", "code", "line", "commands"], said)}
"""


def _name(case: tuple[str, str]) -> str:
    return f"`{case[0]}`, {case[1]}"


def _table(heading: list[str], rows: list[list[str]]) -> str:
    cells = [" | ".join(row) for row in (heading, *rows)]
    cells.insert(1, "|".join(["---"] * len(heading)))
    return "\n".join(f"|{row}|" if row.startswith("---") else f"| {row} |" for row in cells)


def _spell(commands: list[str]) -> str:
    return "all" if len(commands) == len(LINES) else ", ".join(f"`{name}`" for name in commands)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
