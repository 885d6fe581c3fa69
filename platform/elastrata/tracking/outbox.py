"""The outbox: actions that must happen in order, soon, and never at the price of the run."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from elastrata_pipelines.url_secrets import hide_secrets

_log = logging.getLogger(__name__)
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 30.0


class Outbox:
    """Runs actions one after the other in a thread of its own; a failed one is tried again.

    Args:
        what: what the actions do, for the warnings ("MLflow at http://...").
        is_hopeless: whether an action that failed so can never succeed; it is then dropped.
    """

    def __init__(self, what: str, is_hopeless: Callable[[Exception], bool]) -> None:
        self._what = what
        self._is_hopeless = is_hopeless
        self._waiting: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, action: Callable[[], object]) -> None:
        """Takes an action to run after all earlier ones. Returns at once."""
        with self._changed:
            self._waiting.append(action)
            self._changed.notify_all()

    def close(self, seconds: float) -> int:
        """Ends when all is done or `seconds` are over; returns how many actions are left."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting, seconds)
            left = len(self._waiting)
        if not left:
            self._thread.join()
        return left

    def _run(self) -> None:
        wait = _FIRST_WAIT_SECONDS
        while (action := self._next()) is not None:
            try:
                action()
            except Exception as error:  # whatever the library raises must not reach the run
                if not self._is_hopeless(error):
                    self._warn_once("does not answer; trying again", error)
                    self._pause(wait)
                    wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
                    continue
                self._warn_once("refused a record", error)
            wait = _FIRST_WAIT_SECONDS
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting[0] if self._waiting else None

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if self._closing:
                self._changed.wait(_FIRST_WAIT_SECONDS)
            else:
                self._changed.wait_for(lambda: self._closing, seconds)

    def _warn_once(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("%s %s (%s)", self._what, what, _brief(error))


def _brief(error: Exception) -> str:
    lines = hide_secrets(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
