"""Ctrl-C, again and again: while a command runs, while it ends, and when Python itself does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from elastrata.cli.main import app, run
from elastrata.cli.schema import schema
from elastrata.driver.interrupt import SIGNALS, Interrupt, is_ending, shield_from_signals
from elastrata_pipelines.errors import UserError

ENDING = """
import os, signal, sys
from elastrata.cli import main as cli
from elastrata.driver.interrupt import shield_from_signals

def press():
    os.kill(os.getpid(), signal.SIGINT)

@cli.app.command()
def hang():
    print("begun")
    try:
        press()
    finally:
        with shield_from_signals("ending"):
            press()
            {again}
    raise AssertionError("never comes here")

sys.argv = ["elastrata", "hang"]
{at_exit}
cli.main()
"""


@pytest.fixture(autouse=True)
def keep_signal_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started this may ignore it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_signal_waits_and_the_second_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    done = []
    with shield_from_signals("ending Ray"):
        _press()
        done.append(is_ending())
    assert done == [True]
    assert not is_ending()
    assert capsys.readouterr().err == "ending Ray; interrupt again to exit immediately\n"
    with shield_from_signals("ending Ray"):
        _press()
        with pytest.raises(KeyboardInterrupt):
            _press()
    with pytest.raises(KeyboardInterrupt):
        _press()


def test_an_interrupted_command_says_so_in_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(json: bool = False) -> None:
        _press()

    (command,) = [c for c in app.registered_commands if c.callback is schema]
    monkeypatch.setattr(command, "callback", press)
    monkeypatch.setattr(command, "name", "press")
    assert run(["press", "--json"]) == 130
    shown = capsys.readouterr()
    assert shown.err == "interrupted\n"
    assert json.loads(shown.out) == {"status": "error", "errors": ["interrupted"]}


@pytest.mark.parametrize(
    ("again", "at_exit", "told"),
    [
        ("", "", ["ending; interrupt again to exit immediately", "interrupted"]),
        ("press()", "", ["ending; interrupt again to exit immediately"]),
        (
            "",
            "import atexit; atexit.register(press)",
            ["ending; interrupt again to exit immediately", "interrupted"],
        ),
    ],
    ids=["while it ends", "and again", "when Python ends"],
)
def test_no_press_shows_a_traceback(again: str, at_exit: str, told: list[str]) -> None:
    code = ENDING.format(again=again, at_exit=at_exit)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.returncode == 130, done.stderr
    assert done.stdout == "begun\n"
    assert done.stderr.splitlines() == told


def test_a_run_that_can_never_start_is_not_waited_for() -> None:
    interrupt, never = Interrupt(), threading.Event()
    interrupt.fail("processes of the run cannot start: ImportError: no nn")
    with pytest.raises(UserError, match="cannot start: ImportError: no nn"):
        interrupt.run(never.wait, 60.0, pytest.fail)
    assert not interrupt.is_lost
    never.set()


def test_an_action_that_is_left_behind_ends() -> None:
    """With a second signal: its thread must not go on with a Ray that is gone."""
    begun, ended = threading.Event(), threading.Event()

    def action() -> None:
        try:
            begun.set()
            while True:
                threading.Event().wait(0.01)
        finally:
            ended.set()

    def remind(name: str) -> None:
        begun.wait()
        raise KeyboardInterrupt(name)

    interrupt = Interrupt()
    interrupt.ask("SIGINT")
    with pytest.raises(KeyboardInterrupt):
        interrupt.run(action, 60.0, remind)
    assert ended.wait(500)
