"""Functions called side by side, each in a fork of this process."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any


def side_by_side(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results, in order.

    Raises:
        RuntimeError: one of them raised, or its process died.
    """
    context = multiprocessing.get_context("fork")
    begun = []
    for call in calls:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(theirs, call))
        process.start()
        theirs.close()
        begun.append((process, ours))
    return [_result(process, answers) for process, answers in begun]


def _answer(answers: Connection, call: Callable[[], Any]) -> None:
    try:
        answers.send((True, call()))
    except BaseException:
        answers.send((False, traceback.format_exc()))


def _result(process: Any, answers: Connection) -> Any:
    try:
        done, value = answers.recv()
    except EOFError:
        done, value = False, "its process died"
    process.join()
    if not done:
        raise RuntimeError(value)
    return value
