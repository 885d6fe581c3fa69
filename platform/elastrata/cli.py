"""The command line: `elastrata COMMAND`. The only place that turns errors into lines and codes."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Annotated

import typer

from elastrata.commands.doctor import doctor
from elastrata.commands.export import export
from elastrata.commands.inspect import inspect
from elastrata.commands.prepare import prepare
from elastrata.commands.quickstart import quickstart
from elastrata.commands.schema import schema
from elastrata.commands.train import train
from elastrata.console import print_error, print_json_line
from elastrata_pipelines.errors import UserError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="elastrata",
    help="Elastic pre-training of transformer language models on Ray.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for _command in (quickstart, prepare, inspect, train, export, doctor, schema):
    app.command()(_command)


@app.callback()
def _options(
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where in the program a failure arose.")
    ] = False,
) -> None:
    """Elastic pre-training of transformer language models on Ray."""


def main() -> None:
    """The entry point of the `elastrata` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code: 0, 1 (failed), 2 (bad input), 130 (interrupted).

    With `--json` a failure, too, is one object as the last line of standard output.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    wants_traceback = "--traceback" in arguments
    # Taken from wherever it stands: nobody remembers which options go before the command.
    rest = [argument for argument in arguments if argument != "--traceback"]
    try:
        code = app(rest or ["--help"], standalone_mode=False)
    except UserError as error:
        return _fail(BAD_INPUT, error.problems, rest, wants_traceback)
    except typer.TyperException as error:
        return _fail(BAD_INPUT, [_usage(error)], rest, wants_traceback)
    except BrokenPipeError:  # whoever read the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        return _fail(INTERRUPTED, ["interrupted"], rest, wants_traceback)
    except Exception as error:
        lines = [_one_line(error), *getattr(error, "__notes__", [])]
        return _fail(FAILED, lines, rest, wants_traceback)
    return code if isinstance(code, int) else 0


def _fail(code: int, lines: Sequence[str], arguments: Sequence[str], wants_traceback: bool) -> int:
    if wants_traceback:
        traceback.print_exc()
    print_error(*lines)
    if "--json" in arguments:
        print_json_line({"status": "error", "errors": list(lines)})
    return code


def _usage(error: typer.TyperException) -> str:
    message = getattr(error, "format_message", lambda: str(error))()
    return f"{message} Try 'elastrata --help'."


def _one_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0].strip() if lines else "no message"
    return f"{type(error).__name__}: {text} (--traceback shows all)"


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
