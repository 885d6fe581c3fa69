"""Every command under every condition that can end it: the documented exit code, at most three
lines on standard error, never a traceback; and what waits for a server says so before it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from elastrata.cli.main import app
from support.mutations import ROUNDS_VARIABLE
from support.stops import (
    CASES,
    LINES,
    PAGE,
    Ended,
    expected,
    is_json,
    make_home,
    matches,
    missing_means,
    page,
    run_under,
)

MOST_LINES = 3
SAMPLE = [
    *(("status", condition) for condition in ("SIGINT at imports", "SIGTERM at start")),
    *(("status", condition) for condition in ("SIGINT at work", "reader gone", "foreign locale")),
    ("schema", "read-only place"),
]
"""Of commands that start quickly; `make fuzz` tries all cases."""
pytestmark = pytest.mark.timeout(1200)
Note = Callable[[str, str, Ended], None]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    make_home(home)
    return home


@pytest.fixture(scope="module")
def note(request: pytest.FixtureRequest) -> Iterator[Note]:
    """Note how a command has ended; at the end of the module, a table of it is printed."""
    rows = ["", f"{'command':<12}{'condition':<20}code  first line  end"]

    def add(command: str, condition: str, ended: Ended) -> None:
        times = f"{ended.first_seconds:8.1f} s{ended.seconds:8.1f} s"
        rows.append(f"{command:<12}{condition:<20}{ended.code:4}{times}")

    yield add
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and ROUNDS_VARIABLE in os.environ:
        reporter.write("\n".join(rows))


def test_the_table_has_every_command() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert {*LINES} == {*commands}


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/support/stops.py"


@pytest.mark.parametrize(
    ("command", "condition"), CASES if ROUNDS_VARIABLE in os.environ else SAMPLE
)
def test_a_command_ends_as_documented(
    command: str, condition: str, home: Path, tmp_path: Path, note: Note
) -> None:
    if missing := missing_means(condition):
        pytest.skip(missing)
    outcome = expected(command, condition)
    ended = run_under(condition, command, home, tmp_path)
    note(command, condition, ended)
    errors = [line for _, line in ended.err if line]
    shown = "\n".join(line for _, line in (*ended.out, *ended.err))
    assert ended.code == outcome.code, shown
    assert "Traceback" not in shown
    if is_json(command, condition):  # its progress goes to standard error
        assert json.loads(ended.out[-1][1]) == {"status": "error", "errors": errors[-1:]}
    elif ended.code:
        assert len(errors) <= MOST_LINES, shown
    if outcome.line:
        assert matches(outcome.line, errors[-1]), shown
    if condition == "dead server" and LINES[command].server and command != "guard":
        assert len({line for _, line in (*ended.out, *ended.err)}) > 1, "says not what it waits for"
