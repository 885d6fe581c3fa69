"""Termination notices: what a cloud's metadata server says of the machine that asks."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime

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
