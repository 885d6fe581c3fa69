"""The command line: `elastrata COMMAND`. Only this module turns errors into messages and exit
codes."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
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
from elastrata.terminal.console import (
    OUTPUT,
    drop_broken_output,
    escape_foreign_letters,
    prepare_streams,
    print_error,
    print_json_line,
)
from elastrata.workload.installed import expand_segments
from elastrata_pipelines.errors import UserError, escape_controls
from elastrata_pipelines.storage import FULL, describe_disk
from elastrata_pipelines.url_secrets import NO_SECRET, hide_secrets, hide_unrecorded_parts

# 130 is 128 + SIGINT, as shells report it.
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
_MOST_LINES, _MOST_CHARACTERS = 50, 1000
"""Most lines of a failure in a terminal, and most characters of a line; JSON has all."""
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
    """Group of commands that raises Abort for an interrupt."""

    # Typer itself would return an exit code for an interrupt and print nothing.
    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _as_abort():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _as_abort():
            return super().invoke(ctx)


@contextmanager
def _as_abort() -> Iterator[None]:
    """Raise Abort in the place of KeyboardInterrupt."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Abort from None


app = typer.Typer(
    name="elastrata",
    cls=_Commands,
    help="Elastic pre-training of transformer language models on Ray.",
    add_completion=False,
    # `outcome` prints errors in one line each.
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for _command in _COMMANDS:
    app.command()(_command)
app.add_typer(bench)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"elastrata {metadata.version('elastrata')}\n")
        raise typer.Exit


@app.callback()
def _options(
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the traceback of a failure.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Elastic pre-training of transformer language models on Ray."""


def main() -> None:
    """Run the `elastrata` command with the arguments of this process."""
    expand_segments()
    prepare_streams()
    escape_foreign_letters()
    try:
        code = run(sys.argv[1:])
        # Only the shutdown of Python and Ray remains; an interrupt there would print long
        # tracebacks.
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: _exit_now(code))
    except KeyboardInterrupt:  # between the command's end and the lines above
        _exit_now(INTERRUPTED)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code: 0, 1 (failed), 2 (bad input), 130 (interrupted)."""
    for number in SIGNALS:
        # Commands handle SIGTERM, too, as an interrupt, so that they save and clean up.
        signal.signal(number, _interrupt)
    # --traceback is accepted in any position, before or after the command.
    command_arguments = [argument for argument in arguments if argument != "--traceback"]

    def command() -> object:
        _check_current_folder()
        _refuse_secrets(command_arguments)
        # In standalone mode Typer would print errors and exit itself.
        return app(command_arguments or ["--help"], prog_name="elastrata", standalone_mode=False)

    return run_command(
        command, as_json="--json" in command_arguments, with_traceback="--traceback" in arguments
    )


def run_command(command: Callable[[], object], *, as_json: bool, with_traceback: bool) -> int:
    """Run a command and return its exit code; print errors on standard error, one per line.

    Args:
        command: raises, returns its exit code, or returns another object on success.
        as_json: whether to end a failure, too, with one JSON object on standard output.
        with_traceback: whether to print the traceback of a failure.
    """
    code, lines = 0, list[str]()
    try:
        result = command()
        code = result if isinstance(result, int) else 0
        sys.stdout.flush()
    except UserError as error:
        code, lines = BAD_INPUT, [*error.problems]
    except typer.TyperException as error:
        code, lines = BAD_INPUT, [_format_usage(error)]
    except (KeyboardInterrupt, typer.Abort):
        code, lines = INTERRUPTED, ["interrupted"]
    except Exception as error:
        code, lines = _describe_failure(error)
        if with_traceback:
            sys.stderr.write(hide_secrets(escape_controls(traceback.format_exc())))
    if lines:
        # Messages of libraries may contain URLs with passwords.
        lines = [hide_secrets(line) for line in lines]
        print_error(*_shorten(lines))
        if as_json:
            with suppress(OSError):  # standard error has the lines already
                print_json_line({"status": "error", "errors": lines})
    drop_broken_output()
    return code


def _describe_failure(error: Exception) -> tuple[int, list[str]]:
    """Return the exit code of a failed command, and the lines that describe the failure."""
    if isinstance(error, OSError) and error.filename == OUTPUT:
        # A reader that has closed the pipe, as `head` does, wants no message.
        is_unwanted = isinstance(error, BrokenPipeError)
        line = f"{OUTPUT}: cannot be written ({error.strerror})"
        return FAILED, [] if is_unwanted else [line]
    if place := _describe_place(error):
        return BAD_INPUT, [place]
    if folder := _describe_undecodable_folder():
        return BAD_INPUT, [folder]
    return FAILED, [_summarize_error(error), *getattr(error, "__notes__", [])]


def _shorten(lines: Sequence[str]) -> list[str]:
    """Return the first lines, each cut where it is too long, and how many more there are."""
    shown = [
        line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."
        for line in lines[:_MOST_LINES]
    ]
    more = len(lines) - len(shown)
    return [*shown, f"and {more:,} more; --json shows all"] if more else shown


_WRITING = {*FULL, errno.EROFS, errno.ETXTBSY}
_WRONG_PLACE = {
    *_WRITING,
    *(errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO),
}
"""Errors of a path that only the user can put right."""


def _describe_place(error: Exception) -> str | None:
    """Return a line with the path and the reason if a local path that the user chose is the cause
    of an error, such as one on a full or read-only disk; else None."""
    # Ray wraps the error of a task.
    cause = getattr(error, "cause", None) or error
    if not isinstance(cause, OSError) or cause.errno not in _WRONG_PLACE or not cause.filename:
        return None
    path, reason = os.fsdecode(cause.filename), str(cause.strerror)
    if cause.errno in FULL and "mounted" not in reason:
        reason = f"{reason}: {describe_disk(Path(path))}"
    return f"{path}: cannot be {'written' if cause.errno in _WRITING else 'used'} ({reason})"


def _describe_undecodable_folder() -> str | None:
    """Return a line if the path of the current folder is no text in this locale; else None."""
    encoding = sys.getfilesystemencoding()
    try:
        folder = str(Path.cwd())
        folder.encode()
    except OSError:  # it is gone
        return None
    except UnicodeEncodeError:
        # Paths are recorded as UTF-8, which has no place for such bytes.
        return f"{folder}: the current folder's name is not {encoding}; set PYTHONUTF8=1"
    return None


def _check_current_folder() -> None:
    """Check that the current folder exists.

    Raises:
        UserError: it was deleted.
    """
    try:
        Path.cwd()
    except OSError as error:
        raise UserError(
            f"the current folder: {error.strerror}: it was deleted; change to another one"
        ) from None


def _refuse_secrets(arguments: Sequence[str]) -> None:
    """Check that no argument is a URL with a secret, before any output shows it.

    Raises:
        UserError: one line per such argument.
    """
    problems = []
    for previous, argument in zip(("", *arguments), arguments, strict=False):
        key, equals, value = argument.partition("=")
        if not equals or not _KEY.fullmatch(key):
            # The value of an option follows it as a separate argument.
            key, value = previous if previous.startswith("--") else "", argument
        value = value.strip("'\"")
        # Prompts are not recorded, so they may hold any URL except one with a password.
        hidden = hide_secrets(
            value if "generate" in arguments[:1] else hide_unrecorded_parts(value)
        )
        if hidden != value:
            problems.append(": ".join(filter(None, ("command line", key, hidden, NO_SECRET))))
    if problems:
        raise UserError(*problems)


def _format_usage(error: typer.TyperException) -> str:
    message = getattr(error, "format_message", lambda: str(error))()
    context = getattr(error, "ctx", None)
    # Of the command that lacks an argument, if one was recognised.
    command = context.command_path if context else "elastrata"
    return f"{message} Try '{command} --help'."


def _summarize_error(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A first line that ends with a colon announces the next one.
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {text or 'no message'} (--traceback shows all)"


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    # A signal during the teardown means that the user will not wait for it.
    if is_ending():
        _exit_now(INTERRUPTED)
    raise KeyboardInterrupt


def _exit_now(code: int) -> NoReturn:
    """Exit immediately; processes that Ray has started exit with this one."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, RuntimeError):  # a closed pipe; a write that is interrupted
            stream.flush()
    # sys.exit would run the exit handlers, which a second interrupt is meant to skip.
    os._exit(code)
