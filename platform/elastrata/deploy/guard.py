"""The guard of a node: waits for a notice, drains the node as `ray drain-node` does, and waits
until it is empty."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import ray

from elastrata.cluster.ray_internals import ALIVE, PREEMPTION, head_client
from elastrata.deploy.notices import Look, Notice

_SECONDS_TO_ANSWER = 5.0
_SECONDS_BETWEEN_TRIES = 1.0


class Nodes:
    """The Ray nodes of this machine.

    Args:
        address: of the cluster; None: that of the Ray which runs here.
        node_id: of the only node that is meant; None: every node with this machine's address.

    Raises:
        ConnectionError: no Ray runs here, or the cluster does not answer.
    """

    def __init__(self, address: str | None, node_id: str | None) -> None:
        self._gcs = head_client(address)
        self._node_id = node_id
        self._ip = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def alive(self) -> list[str]:
        """Their ids, while Ray takes them for alive."""
        nodes = self._gcs.get_all_node_info(timeout=_SECONDS_TO_ANSWER)
        return [
            node.node_id.hex()
            for node in nodes.values()
            if node.state == ALIVE and self._is_meant(node)
        ]

    def drain(self, ids: Sequence[str], text: str, time: float) -> list[str]:
        """Tells the cluster that the nodes will be gone; what it says where it refuses.

        Args:
            ids: of the nodes.
            text: why.
            time: when, in Unix time.
        """
        answers = [
            self._gcs.drain_node(node, PREEMPTION, text, math.floor(time * 1000)) for node in ids
        ]
        return [str(reason) for is_accepted, reason in answers if not is_accepted]

    def _is_meant(self, node: Any) -> bool:
        if self._node_id is not None:
            return bool(node.node_id.hex() == self._node_id)
        return bool(node.node_manager_address == self._ip)


def wait_for_notice(
    look: Look, ended: Event, *, seconds_between: float, say: Callable[[str], None]
) -> Notice | None:
    """Asks again and again, until there is a notice, or `ended` is set: then None.

    Args:
        look: asks the metadata server.
        ended: set from elsewhere, as by a signal.
        seconds_between: two looks.
        say: told once when the server stops answering, and once when it answers again.
    """
    is_silent = False
    while not ended.is_set():
        try:
            notice = look(time.time())
        except (OSError, ValueError, KeyError) as error:  # no answer, or none that makes sense
            if not is_silent:
                say(f"the metadata server does not answer as it should ({error}); asking on")
            is_silent = True
        else:
            if is_silent:
                say("the metadata server answers again")
            is_silent = False
            if notice is not None:
                return notice
        ended.wait(seconds_between)
    return None


def drain(
    notice: Notice, *, address: str | None, node_id: str | None, say: Callable[[str], None]
) -> Nodes | None:
    """Tells the cluster; tries until it has been told or the time of the notice has come.

    Returns:
        The nodes that were drained; None where there was nobody to tell.
    """
    failure = ""
    while True:
        try:
            nodes = Nodes(address, node_id)
            ids = nodes.alive()
            refusals = nodes.drain(ids, notice.text, notice.time)
        except Exception as error:  # Ray's own kinds; nothing else is left to do on this machine
            failure = str(error).strip().splitlines()[0]
        else:
            if ids and not refusals:
                seconds = max(0.0, notice.time - time.time())
                names = ", ".join(ids)
                say(f"{notice.text}; drained {names}, which will be gone in {seconds:.0f} s")
                return nodes
            failure = refusals[0] if refusals else "no Ray node of this machine is alive"
        if time.time() >= notice.time:
            say(f"{notice.text}; not drained: {failure}")
            return None
        time.sleep(_SECONDS_BETWEEN_TRIES)


def wait_until_gone(nodes: Nodes, until: float) -> bool:
    """Waits until Ray has none of the nodes any more: a drained node that is idle ends itself.

    Args:
        nodes: that were drained.
        until: Unix time at which to give up.
    """
    while time.time() < until:
        try:
            if not nodes.alive():
                return True
        except Exception:  # the cluster's tables may be gone before the node
            return False
        time.sleep(_SECONDS_BETWEEN_TRIES)
    return False
