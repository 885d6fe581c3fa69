"""The attendant: a helper of the run that answers nobody is killed, so that Ray replaces it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from threading import Event as Flag
from threading import Thread
from typing import Any

import ray

from elastrata.cluster.patience import Patience

MOST_SECONDS = 20.0
"""Helpers do little: one that takes longer to answer does not answer."""
_LOOK_SECONDS = 0.5
_START_SECONDS = 120.0
"""A new process, on a machine that is busy training."""


class Attendant:
    """Asks helpers, again and again, whether they are there, in a thread of its own.

    Args:
        helpers: actors with a method `ping` that Ray starts again where they end, by name.
        seconds: how long one may take to answer; `MOST_SECONDS` at most.
        warn: called with a line for every helper that is replaced.
    """

    def __init__(
        self, helpers: Mapping[str, Any], seconds: float, warn: Callable[[str], None]
    ) -> None:
        limit = min(seconds, MOST_SECONDS)
        self._wards = [_Ward(name, actor, limit) for name, actor in helpers.items()]
        self._warn = warn
        self._closed = Flag()
        self._thread = Thread(target=self._watch, name="elastrata-attendant", daemon=True)
        self._thread.start()

    @property
    def is_content(self) -> bool:
        """Whether every helper has answered since it was started."""
        return all(ward.is_there for ward in self._wards)

    def close(self) -> None:
        """Asks no more."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            for ward in self._wards:
                if line := ward.look(time.monotonic()):
                    self._warn(line)


class _Ward:
    """One helper."""

    def __init__(self, name: str, actor: Any, seconds: float) -> None:
        self._name, self._actor = name, actor
        self._patience = Patience(seconds, max(seconds, _START_SECONDS))
        self._asked: Any = None
        self.is_there = False
        """Whether it has answered since it was started."""

    def look(self, now: float) -> str:
        """Replaces the helper where it does not answer; says so in a line, empty where it does."""
        if self._asked is None:
            self._asked = self._actor.ping.remote()
        if ray.wait([self._asked], timeout=0)[0]:
            self._hear()
        if not self._patience.is_over(now):
            return ""
        line = f"the {self._name} has not answered for {self._patience.silent:.0f} s: replaced"
        ray.kill(self._actor, no_restart=False)  # Ray sends SIGKILL after 5 s, to stopped ones too
        self._begin()
        return line

    def _hear(self) -> None:
        try:
            ray.get(self._asked)
        except ray.exceptions.RayError:  # it died: Ray starts another one
            if self.is_there:
                self._begin()
        else:
            self._patience.heard()
            self.is_there = True
        self._asked = None

    def _begin(self) -> None:
        self._patience.starts_anew()
        self._asked, self.is_there = None, False
