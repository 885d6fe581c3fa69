"""Preemption: a cloud's notice that this machine will be taken away becomes a drain of its node.

`elastrata guard` asks the metadata server, drains the machine's Ray nodes as `ray drain-node` does,
and waits until they are empty.
"""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Event

import ray

from elastrata.cluster.nodes import nodes
from elastrata.driver.ray_session import ray_session

_SECONDS_TO_ANSWER = 2.0
_AWS_TOKEN_SECONDS = 21_600
_GCP_SECONDS = 30.0
"""From notice to end, by Google's documentation of spot machines."""
_AZURE_API = "2020-07-01"
_AZURE_ENDS = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Events after which Ray does not run there any more. `Freeze` is a pause of seconds."""


@dataclass(frozen=True)
class Notice:
    """The machine will be taken away."""

    text: str
    """Why, for people."""
    time: float
    """When, in Unix time."""


Look = Callable[[float], Notice | None]
"""Asks the metadata server, at a Unix time; raises OSError where it gives no answer."""


def aws(url: str) -> Look:
    """AWS: two minutes before a spot machine is interrupted (IMDSv2's `spot/instance-action`)."""
    token = _Token(url)

    def look(now: float) -> Notice | None:
        headers = {"X-aws-ec2-metadata-token": token.at(now)}
        answer = _get(f"{url}/latest/meta-data/spot/instance-action", headers)
        if answer is None:  # 404: there is none
            return None
        action = json.loads(answer)
        time = datetime.fromisoformat(action["time"]).timestamp()
        return Notice(f"AWS: the spot machine gets: {action['action']}", time)

    return look


def gcp(url: str) -> Look:
    """Google Cloud: 30 seconds before a spot machine is preempted (`instance/preempted`)."""

    def look(now: float) -> Notice | None:
        answer = _get(f"{url}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        if answer is None or answer.strip() != "TRUE":
            return None
        return Notice("Google Cloud: the spot machine is preempted", now + _GCP_SECONDS)

    return look


def azure(url: str) -> Look:
    """Azure: at least 30 seconds before a spot machine is evicted, and before other events that end
    it (Scheduled Events). Events name the machines they are for, and are never approved: that would
    only hasten them."""
    headers = {"Metadata": "true"}
    name = f"{url}/metadata/instance/compute/name?api-version={_AZURE_API}&format=text"

    def look(now: float) -> Notice | None:
        answer = _get(f"{url}/metadata/scheduledevents?api-version={_AZURE_API}", headers)
        events = json.loads(answer or "{}").get("Events", [])
        ends = [event for event in events if event["EventType"] in _AZURE_ENDS]
        own = _get(name, headers) if ends else None
        for event in ends:
            if own in event["Resources"]:
                starts = event.get("NotBefore")  # empty where it has started
                time = parsedate_to_datetime(starts).timestamp() if starts else now
                return Notice(f"Azure: the machine gets: {event['EventType']}", time)
        return None

    return look


CLOUDS: Mapping[str, tuple[Callable[[str], Look], str]] = {
    "aws": (aws, "http://169.254.169.254"),
    "gcp": (gcp, "http://metadata.google.internal"),
    "azure": (azure, "http://169.254.169.254"),
}
"""By the name of the cloud: how it is asked, and where."""


class _Token:
    """AWS's session token, made anew before it runs out."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._value = ""
        self._until = float("-inf")

    def at(self, now: float) -> str:
        """The token to use at a time."""
        if now >= self._until:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_SECONDS)}
            self._value = _get(f"{self._url}/latest/api/token", headers, method="PUT") or ""
            self._until = now + _AWS_TOKEN_SECONDS / 2
        return self._value


def _get(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """The answer of a metadata server, which no proxy leads to; None where there is no such thing.

    Raises:
        OSError: it gives no answer, or one of failure.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with opener.open(request, timeout=_SECONDS_TO_ANSWER) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


_SECONDS_TO_CONNECT = 3.0
_SECONDS_BETWEEN_TRIES = 1.0
_REASON = "DRAIN_NODE_REASON_PREEMPTION"


def wait_for_notice(
    look: Look, ended: Event, *, seconds_between: float, say: Callable[[str], None]
) -> Notice | None:
    """Ask again and again, until there is a notice, or `ended` is set: then None.

    Args:
        look: asks the metadata server.
        ended: set from elsewhere, as by a signal.
        seconds_between: two looks.
        say: called once when the server stops answering, and once when it answers again.
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


@dataclass(frozen=True)
class RayNode:
    """A live Ray node of this machine, and where its raylet listens."""

    id: str
    host: str
    port: int

    def lives(self) -> bool:
        """Return whether the raylet takes connections."""
        try:
            socket.create_connection((self.host, self.port), _SECONDS_TO_CONNECT).close()
        except OSError:
            return False
        return True


def find_nodes(address: str | None, node_id: str | None) -> list[RayNode]:
    """Return the live Ray nodes of this machine.

    Args:
        address: of the cluster; None: that of the Ray which runs here.
        node_id: of the only node that is meant; None: every node with this machine's address.

    Raises:
        UserError: no Ray runs here, or the cluster does not answer.
    """
    # Joined for the question only: a driver that stays would be lost with the node's raylet.
    with ray_session(address or "auto"):
        here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return [
            RayNode(node["NodeID"], node["NodeManagerAddress"], node["NodeManagerPort"])
            for node in nodes()
            if node["Alive"]
            and (node["NodeID"] == node_id if node_id else node["NodeManagerAddress"] == here)
        ]


def drain(
    notice: Notice, *, address: str | None, node_id: str | None, say: Callable[[str], None]
) -> list[RayNode]:
    """Drain this machine's nodes; try until it has worked or the time of the notice has come.

    Returns:
        The nodes that were drained; empty if there was none to drain.
    """
    failure = ""
    while True:
        try:
            found = find_nodes(address, node_id)
            for node in found:
                _drain_node(node, notice, address)
        except Exception as error:  # Ray's own kinds; nothing else is left to do on this machine
            failure = str(error).strip().splitlines()[-1]
        else:
            if found:
                seconds = max(0.0, notice.time - time.time())
                names = ", ".join(node.id for node in found)
                say(f"{notice.text}; drained {names}, which will be gone in {seconds:.0f} s")
                return found
            failure = "no Ray node of this machine is alive"
        if time.time() >= notice.time:
            say(f"{notice.text}; not drained: {failure}")
            return []
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _drain_node(node: RayNode, notice: Notice, address: str | None) -> None:
    """Run `ray drain-node`: Ray has no other public way.

    Raises:
        RuntimeError: the cluster refuses.
    """
    seconds = max(0, math.floor(notice.time - time.time()))
    command = [
        str(Path(sys.executable).with_name("ray")),
        *("drain-node", "--address", address or "auto", "--node-id", node.id),
        *("--reason", _REASON, "--reason-message", notice.text),
        *("--deadline-remaining-seconds", str(seconds)),
    ]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"exit code {done.returncode}")


def wait_until_gone(drained: Sequence[RayNode], until: float) -> bool:
    """Wait until no raylet of the nodes is left: one that is drained and idle ends itself.

    Args:
        drained: the nodes.
        until: Unix time at which to give up.
    """
    while time.time() < until:
        if not any(node.lives() for node in drained):
            return True
        time.sleep(_SECONDS_BETWEEN_TRIES)
    return False
