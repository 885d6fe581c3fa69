"""The command line: `elastrata COMMAND`. The only place that turns errors into lines and codes."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from elastrata.cli.audit import audit
from elastrata.cli.bench import bench
from elastrata.cli.doctor import doctor
from elastrata.cli.inspect import inspect
from elastrata.cli.jobs import guard, stop, submit
from elastrata.cli.models import evaluate, export, generate
from elastrata.cli.plan import plan
from elastrata.cli.prepare import prepare
from elastrata.cli.quickstart import quickstart
from elastrata.cli.rehearse import rehearse
from elastrata.cli.runs import fork, runs, status
from elastrata.cli.schema import schema
from elastrata.cli.simulate import simulate
from elastrata.cli.sweep import sweep
from elastrata.cli.train import train
from elastrata.driver.interrupt import SIGNALS, is_ending
from elastrata.terminal.console import escape_foreign_letters, print_error, print_json_line
from elastrata.workload.installed import expand_segments
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.url_secrets import NO_SECRET, hide_secrets, without_secrets

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
_KEY = re.compile(r"(?:--)?[\w.-]+")

_COMMANDS = (
    quickstart,
    prepare,
    inspect,
    plan,
    rehearse,
    simulate,
    train,
    fork,
    sweep,
    submit,
    runs,
    status,
    stop,
    audit,
    export,
    generate,
    evaluate,
    doctor,
    guard,
    schema,
)


class _Commands(typer.core.TyperGroup):
    """The commands. Typer would make an exit code of an interrupt, and tell nothing."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


app = typer.Typer(
    name="elastrata",
    cls=_Commands,
    help="Elastic pre-training of transformer language models on Ray.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for _command in _COMMANDS:
    app.command()(_command)
app.add_typer(bench)


@app.callback()
def _options(
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where in the program a failure arose.")
    ] = False,
) -> None:
    """Elastic pre-training of transformer language models on Ray."""


def main() -> None:
    """The entry point of the `elastrata` command."""
    expand_segments()
    escape_foreign_letters()
    code = run(sys.argv[1:])
    # What is left is Python's own end, and Ray's: an exception there would be told in pages.
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: _leave(code))
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code: 0, 1 (failed), 2 (bad input), 130 (interrupted)."""
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    # Taken from wherever it stands: nobody remembers which options go before the command.
    rest = [argument for argument in arguments if argument != "--traceback"]

    def command() -> object:
        _refuse_secrets(rest)
        return app(rest or ["--help"], prog_name="elastrata", standalone_mode=False)

    return outcome(command, as_json="--json" in rest, with_traceback="--traceback" in arguments)


def outcome(command: Callable[[], object], *, as_json: bool, with_traceback: bool) -> int:
    """The exit code of a command; errors are told in lines on standard error.

    Args:
        command: raises, returns its exit code, or returns something else where all is well.
        as_json: whether a failure, too, is one JSON object as the last line of standard output.
        with_traceback: whether to show where in the program a failure arose.
    """
    try:
        code = command()
    except UserError as error:
        failure = BAD_INPUT, error.problems
    except typer.TyperException as error:
        failure = BAD_INPUT, (_usage(error),)
    except (KeyboardInterrupt, typer.Abort):
        failure = INTERRUPTED, ("interrupted",)
    except BrokenPipeError:  # whoever read the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        failure = FAILED, (_one_line(error), *getattr(error, "__notes__", []))
        if with_traceback:
            sys.stderr.write(hide_secrets(traceback.format_exc()))
    else:
        return code if isinstance(code, int) else 0
    lines = [*map(hide_secrets, failure[1])]
    print_error(*lines)
    if as_json:
        print_json_line({"status": "error", "errors": lines})
    return failure[0]


def _refuse_secrets(arguments: Sequence[str]) -> None:
    """Make sure that no argument is a URL that may not be recorded, before anything shows one.

    Raises:
        UserError: a line for each that is.
    """
    problems = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        key, equals, value = argument.partition("=")
        if not equals or not _KEY.fullmatch(key):
            key, value = before if before.startswith("--") else "", argument
        value = value.strip("'\"")
        # A prompt is recorded nowhere, and may be any URL but one with a password.
        hidden = hide_secrets(value if "generate" in arguments[:1] else without_secrets(value))
        if hidden != value:
            problems.append(": ".join(filter(None, ("command line", key, hidden, NO_SECRET))))
    if problems:
        raise UserError(*problems)


def _usage(error: typer.TyperException) -> str:
    message = getattr(error, "format_message", lambda: str(error))()
    return f"{message} Try 'elastrata --help'."


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {text or 'no message'} (--traceback shows all)"


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    if is_ending():
        _leave(INTERRUPTED)
    raise KeyboardInterrupt


def _leave(code: int) -> NoReturn:
    """Ends the process here and now; what Ray has started ends with it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, RuntimeError):  # nobody reads it; it is just being written
            stream.flush()
    os._exit(code)
