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
from support.nodes import Nodes, actors, send, train_workers
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


@dataclass
class Chaos:
    """Injects faults into a run that trains on `cluster`."""

    cluster: Nodes
    live: LiveRun
    random: random.Random
    alive: list[Any] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)

    def inject(self, kinds: Iterable[str]) -> None:
        """These faults, each when the run has got a little further; fewer where it ends first."""
        begun = time.time()
        for kind in kinds:
            if not self._further():
                return
            getattr(self, f"_{kind.replace(' ', '_')}")()
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

    def _kill_worker(self) -> None:
        self._send(signal.SIGKILL)

    def _hang_worker(self) -> None:
        self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        workers = train_workers(self.cluster.address)
        if workers:  # none: the run is between two groups
            send(self.random.choice(workers), number)

    def _kill_controller(self) -> None:
        for controller in actors("TrainController", self.cluster.address):
            send(controller, signal.SIGKILL)

    def _kill_node(self) -> None:
        self.cluster.kill(self._leaving())

    def _drain_node(self) -> None:
        self.cluster.drain(self._leaving(), seconds=120)

    def _leaving(self) -> Any:
        """Any node; another one comes first where it is the last."""
        if len(self.alive) == 1:
            self._add_node()
        return self.alive.pop(self.random.randrange(len(self.alive)))

    def _add_node(self) -> None:
        if len(self.alive) < MOST_NODES:
            self.alive.append(self.cluster.add(cpus=CPUS))
