"""Faults that come over a run, one after the other."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from support.command import wait_until
from support.live_run import LiveRun
from support.nodes import Nodes, actors, send
from support.short_steps import CPUS

KINDS = (
    "kill worker",
    "hang worker",
    "kill controller",
    "kill node",
    "drain node",
    "add node",
)
MOST_NODES = 3
AT_ONCE = 0.25
"""The share of faults that come while the run may still recover from the one before."""


@dataclass
class Chaos:
    """Injects faults into a run that trains on `cluster`."""

    cluster: Nodes
    live: LiveRun
    random: random.Random
    alive: list[Any] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    at_once: float = AT_ONCE

    def inject(self, kinds: Iterable[str]) -> None:
        """These faults, most of them when the run has got a little further, some at once; fewer
        where it ends first. One that finds no victim is not counted."""
        begun = time.time()
        for kind in kinds:
            if self._has_ended() or (self.random.random() >= self.at_once and not self._further()):
                return
            if getattr(self, f"_{kind.replace(' ', '_')}")():
                self.faults.append({"kind": kind, "seconds": round(time.time() - begun, 1)})
                print(f"  {self.faults[-1]['seconds']:6.1f} s  {kind}", flush=True)

    def _further(self) -> bool:
        """Waits for three more lines of progress; False where the run has ended."""
        before = self.live.output.count("\nstep ")

        def is_further() -> bool:
            return self._has_ended() or self.live.output.count("\nstep ") >= before + 3

        wait_until(is_further, 180, f"progress\n{self.live.output}")
        return not self._has_ended()

    def _has_ended(self) -> bool:
        return self.live.driver.poll() is not None

    def _kill_worker(self) -> bool:
        return self._send("RayTrainWorker", signal.SIGKILL)

    def _hang_worker(self) -> bool:
        return self._send("RayTrainWorker", signal.SIGSTOP)

    def _kill_controller(self) -> bool:
        return self._send("TrainController", signal.SIGKILL)

    def _send(self, name: str, number: signal.Signals) -> bool:
        """To one of the actors of that name; there is none where the run is between two groups."""
        found = actors(name, self.cluster.address)
        if found:
            send(self.random.choice(found), number)
        return bool(found)

    def _kill_node(self) -> bool:
        self.cluster.kill(self._leaving())
        return True

    def _drain_node(self) -> bool:
        self.cluster.drain(self._leaving(), seconds=120)
        return True

    def _leaving(self) -> Any:
        """Any node; another one comes first where it is the last."""
        if len(self.alive) == 1:
            self._add_node()
        return self.alive.pop(self.random.randrange(len(self.alive)))

    def _add_node(self) -> bool:
        if len(self.alive) < MOST_NODES:
            self.alive.append(self.cluster.add(cpus=CPUS))
            return True
        return False
