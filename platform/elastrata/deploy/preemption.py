"""Preemption: drains this machine's Ray nodes on a cloud's notice that it will be taken away.

`elastrata guard` polls the metadata server, drains the nodes as `ray drain-node` does, and waits
until they are empty.
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

from elastrata.cluster.nodes import list_nodes
from elastrata.driver.ray_session import ray_session

_SECONDS_TO_ANSWER = 2.0
_AWS_TOKEN_SECONDS = 21_600
_GCP_SECONDS = 30.0
"""Time from notice to end, by Google's documentation of spot machines."""
_AZURE_API = "2020-07-01"
_AZURE_ENDS = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Events that end Ray on the machine. `Freeze` is only a pause of seconds."""


@dataclass(frozen=True)
class Notice:
    """The machine will be taken away."""

    text: str
    """Reason, for the user."""
    time: float
    """Unix time of the end."""


NoticeQuery = Callable[[float], Notice | None]
"""Function that queries the metadata server at a Unix time; raises OSError without an answer."""


def query_aws(url: str) -> NoticeQuery:
    """Return a look for AWS: two minutes before a spot machine is interrupted (IMDSv2's
    `spot/instance-action`)."""
    token = _Token(url)

    def look(now: float) -> Notice | None:
        headers = {"X-aws-ec2-metadata-token": token.at(now)}
        answer = _get(f"{url}/latest/meta-data/spot/instance-action", headers)
        if answer is None:  # 404: no notice
            return None
        action = json.loads(answer)
        time = datetime.fromisoformat(action["time"]).timestamp()
        return Notice(f"AWS: action for the spot instance: {action['action']}", time)

    return look


def query_gcp(url: str) -> NoticeQuery:
    """Return a look for Google Cloud: 30 seconds before a spot machine is preempted
    (`instance/preempted`)."""

    def look(now: float) -> Notice | None:
        answer = _get(f"{url}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        if answer is None or answer.strip() != "TRUE":
            return None
        return Notice("Google Cloud: the spot VM is being preempted", now + _GCP_SECONDS)

    return look


def query_azure(url: str) -> NoticeQuery:
    """Return a look for Azure: at least 30 seconds before a spot machine is evicted, and before
    other events that end it (Scheduled Events)."""
    headers = {"Metadata": "true"}
    name = f"{url}/metadata/instance/compute/name?api-version={_AZURE_API}&format=text"

    def look(now: float) -> Notice | None:
        answer = _get(f"{url}/metadata/scheduledevents?api-version={_AZURE_API}", headers)
        events = json.loads(answer or "{}").get("Events", [])
        ends = [event for event in events if event["EventType"] in _AZURE_ENDS]
        # Events name the machines that they affect. They are never approved: that would hasten
        # them.
        own_name = _get(name, headers) if ends else None
        for event in ends:
            if own_name in event["Resources"]:
                starts = event.get("NotBefore")  # empty once it has started
                time = parsedate_to_datetime(starts).timestamp() if starts else now
                return Notice(f"Azure: event for the VM: {event['EventType']}", time)
        return None

    return look


CLOUDS: Mapping[str, tuple[Callable[[str], NoticeQuery], str]] = {
    "aws": (query_aws, "http://169.254.169.254"),
    "gcp": (query_gcp, "http://metadata.google.internal"),
    "azure": (query_azure, "http://169.254.169.254"),
}
"""Look and address of the metadata server, by the name of the cloud."""


class _Token:
    """AWS's session token, renewed before it expires."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._value = ""
        self._until = float("-inf")

    def at(self, now: float) -> str:
        """Return a token that is valid at this Unix time."""
        if now >= self._until:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_SECONDS)}
            self._value = _get(f"{self._url}/latest/api/token", headers, method="PUT") or ""
            # Renewed at half of its lifetime, well before it expires.
            self._until = now + _AWS_TOKEN_SECONDS / 2
        return self._value


def _get(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """Return the answer of a metadata server, without a proxy; None for status 404.

    Raises:
        OSError: the server does not answer, or with another error.
    """
    # The server is link-local: a proxy would not reach it.
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
    look: NoticeQuery, ended: Event, *, seconds_between: float, say: Callable[[str], None]
) -> Notice | None:
    """Poll until a notice comes; return None once `ended` is set.

    Args:
        look: queries the metadata server.
        ended: set by another thread or a signal handler.
        seconds_between: interval of the polls.
        say: called once when the server stops answering, and once when it answers again.
    """
    is_silent = False
    while not ended.is_set():
        try:
            notice = look(time.time())
        except (OSError, ValueError, KeyError) as error:  # no answer, or an invalid one
            if not is_silent:
                say(f"unexpected answer of the metadata server ({error}); trying again")
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
    """A live Ray node of this machine, with the address of its raylet."""

    id: str
    host: str
    port: int

    def lives(self) -> bool:
        """Return True if the raylet takes connections."""
        try:
            socket.create_connection((self.host, self.port), _SECONDS_TO_CONNECT).close()
        except OSError:
            return False
        return True


def find_nodes(address: str | None, node_id: str | None) -> list[RayNode]:
    """Return the live Ray nodes of this machine.

    Args:
        address: address of the cluster; None for the Ray that runs here.
        node_id: id of the only node to return; None for every node with this machine's address.

    Raises:
        UserError: no Ray runs here, or the cluster does not answer.
    """
    # Connected only for this call: a driver that stays would be lost with the node's raylet.
    with ray_session(address or "auto"):
        local_ip = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return [
            RayNode(node["NodeID"], node["NodeManagerAddress"], node["NodeManagerPort"])
            for node in list_nodes()
            if node["Alive"]
            and (node["NodeID"] == node_id if node_id else node["NodeManagerAddress"] == local_ip)
        ]


def drain(
    notice: Notice, *, address: str | None, node_id: str | None, say: Callable[[str], None]
) -> list[RayNode]:
    """Drain this machine's nodes; retry until it succeeds or the time of the notice has come.

    Returns:
        The drained nodes; empty if draining failed.
    """
    failure = ""
    while True:
        try:
            ray_nodes = find_nodes(address, node_id)
            for node in ray_nodes:
                _drain_node(node, notice, address)
        except Exception as error:  # of any kind that Ray raises: only a retry can help
            failure = str(error).strip().splitlines()[-1]
        else:
            if ray_nodes:
                seconds = max(0.0, notice.time - time.time())
                names = ", ".join(node.id for node in ray_nodes)
                say(f"{notice.text}; drained {names}, which will stop in {seconds:.0f} s")
                return ray_nodes
            failure = "no Ray node of this machine is alive"
        if time.time() >= notice.time:
            say(f"{notice.text}; not drained: {failure}")
            return []
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _drain_node(node: RayNode, notice: Notice, address: str | None) -> None:
    """Run `ray drain-node`.

    Raises:
        RuntimeError: the cluster refuses.
    """
    # Ray has no other public way to drain a node.
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
    """Wait until no raylet of the nodes is left; return False at the deadline.

    Args:
        drained: the nodes.
        until: Unix time of the deadline.
    """
    while time.time() < until:
        # A raylet that is drained and idle ends itself.
        if not any(node.lives() for node in drained):
            return True
        time.sleep(_SECONDS_BETWEEN_TRIES)
    return False
