"""Spot machines: a cloud's notice, or SIGTERM, drains the node before it is gone."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from threading import Event, Thread

import pytest

from elastrata.cli.main import run
from elastrata.deploy.preemption import (
    find_nodes,
    query_aws,
    query_azure,
    query_gcp,
    wait_for_notice,
)
from support.command import start, wait_until
from support.metadata import Metadata, metadata_server
from support.nodes import Nodes as Cluster
from support.nodes import nodes

AWS_TOKEN, AWS_ACTION = "/latest/api/token", "/latest/meta-data/spot/instance-action"
GCP_PREEMPTED = "/computeMetadata/v1/instance/preempted"
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2020-07-01&format=text"
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
PATIENCE_SECONDS = 300


@pytest.fixture(autouse=True)
def answers_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process wait for servers that share a busy machine with it."""
    monkeypatch.setattr("elastrata.deploy.preemption._SECONDS_TO_ANSWER", PATIENCE_SECONDS)


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    """A server with what the clouds ask of every request."""
    with metadata_server() as server:
        server.answers[AWS_TOKEN] = "secret"
        server.needs = {
            AWS_TOKEN: ("X-aws-ec2-metadata-token-ttl-seconds", "*"),
            AWS_ACTION: ("X-aws-ec2-metadata-token", "secret"),
            GCP_PREEMPTED: ("Metadata-Flavor", "Google"),
            AZURE_EVENTS: ("Metadata", "true"),
            AZURE_NAME: ("Metadata", "true"),
        }
        yield server


def _event(kind: str, *machines: str, at: datetime | None = NOON) -> dict[str, object]:
    starts = format_datetime(at, usegmt=True) if at else ""
    return {"EventId": "1", "EventType": kind, "Resources": machines, "NotBefore": starts}


def test_aws_two_minutes_before(metadata: Metadata) -> None:
    look = query_aws(metadata.url)
    assert look(0.0) is None
    action = {"action": "terminate", "time": NOON.strftime("%Y-%m-%dT%H:%M:%SZ")}
    metadata.answers[AWS_ACTION] = json.dumps(action)
    notice = look(1.0)
    assert notice is not None
    assert (notice.time, notice.text) == (
        NOON.timestamp(),
        "AWS: action for the spot instance: terminate",
    )
    assert metadata.asked.count(("PUT", AWS_TOKEN)) == 1
    look(20_000.0)  # the token's time is nearly over
    assert metadata.asked.count(("PUT", AWS_TOKEN)) == 2


def test_google_30_seconds_before(metadata: Metadata) -> None:
    look = query_gcp(metadata.url)
    metadata.answers[GCP_PREEMPTED] = "FALSE"
    assert look(100.0) is None
    metadata.answers[GCP_PREEMPTED] = "TRUE"
    notice = look(100.0)
    assert notice is not None
    assert notice.time == 130.0


@pytest.mark.parametrize("kind", ["Preempt", "Reboot"])
def test_azure_tells_of_events_that_end_this_machine(kind: str, metadata: Metadata) -> None:
    metadata.answers[AZURE_NAME] = "this"
    others = [_event("Preempt", "another"), _event("Freeze", "this")]
    metadata.answers[AZURE_EVENTS] = json.dumps({"DocumentIncarnation": 1, "Events": others})
    look = query_azure(metadata.url)
    assert look(0.0) is None
    metadata.answers[AZURE_EVENTS] = json.dumps({"Events": [*others, _event(kind, "a", "this")]})
    notice = look(0.0)
    assert notice is not None
    assert notice.time == NOON.timestamp()
    assert notice.text == f"Azure: event for the VM: {kind}"
    metadata.answers[AZURE_EVENTS] = json.dumps({"Events": [_event(kind, "this", at=None)]})
    started = look(77.0)
    assert started is not None
    assert started.time == 77.0
    assert {method for method, _ in metadata.asked} == {"GET"}  # no event is approved


def test_a_server_that_fails_is_asked_on_and_told_of_once(metadata: Metadata) -> None:
    said: list[str] = []
    found = []
    metadata.broken = True
    asking = Thread(
        target=lambda: found.append(
            wait_for_notice(query_gcp(metadata.url), Event(), seconds_between=0.01, say=said.append)
        ),
        daemon=True,
    )
    asking.start()
    wait_until(lambda: len(metadata.asked) > 3, PATIENCE_SECONDS, "several questions")
    metadata.broken = False
    asked = len(metadata.asked)
    wait_until(lambda: len(metadata.asked) > asked + 1, PATIENCE_SECONDS, "an answer of none")
    metadata.answers[GCP_PREEMPTED] = "TRUE"
    asking.join()
    assert found[0] is not None
    assert len(said) == 2
    assert said[0].startswith("unexpected answer of the metadata server (HTTP Error 503")
    assert said[1] == "the metadata server answers again"


def test_input_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["guard", "--cloud", "asw"]) == 2
    assert run(["guard"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "--cloud: asw: expected one of aws, gcp, azure (did you mean 'aws'?)"
    assert second == "expected --cloud, --on-sigterm or --now"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with nodes() as cluster:
        yield cluster


def test_a_notice_drains_the_node_of_a_real_cluster(
    cluster: Cluster, metadata: Metadata, tmp_path: Path
) -> None:
    """The raylet, which is idle, then ends itself."""
    going, staying = cluster.add(cpus=1), cluster.add(cpus=1)
    log = tmp_path / "log"
    guard = start(
        *("guard", "--cloud", "aws", "--metadata", metadata.url, "--every", "0.2"),
        *("--address", cluster.address, "--node", going.node_id),
        log=log,
    )
    wait_until(lambda: metadata.asked, PATIENCE_SECONDS, "the first question")
    # Late enough for a guard that gets little of the machine: it tries until then.
    ends = datetime.fromtimestamp(time.time() + 2 * PATIENCE_SECONDS, UTC)
    action = {"action": "terminate", "time": ends.strftime("%Y-%m-%dT%H:%M:%SZ")}
    metadata.answers[AWS_ACTION] = json.dumps(action)
    assert guard.wait(timeout=PATIENCE_SECONDS) == 0, log.read_text(encoding="utf-8")
    assert f"action for the spot instance: terminate; drained {going.node_id}" in log.read_text(
        encoding="utf-8"
    )
    wait_until(
        lambda: not find_nodes(cluster.address, going.node_id), PATIENCE_SECONDS, "the node's end"
    )
    alive = {node.id for node in find_nodes(cluster.address, None)}
    assert staying.node_id in alive
    assert going.node_id not in alive


@pytest.mark.matrix  # a cluster
def test_a_pod_that_is_to_end_waits_until_its_node_has(cluster: Cluster, tmp_path: Path) -> None:
    going = cluster.add(cpus=1)
    log = tmp_path / "log"
    where = ("--address", cluster.address, "--node", going.node_id)
    guard = start("guard", "--on-sigterm", "100", *where, log=log)
    wait_until(
        lambda: "waiting for SIGTERM" in log.read_text(encoding="utf-8"), 60, "a guard that waits"
    )
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(timeout=90) == 0, log.read_text(encoding="utf-8")
    assert f"drained {going.node_id}" in log.read_text(encoding="utf-8")
    assert log.read_text(encoding="utf-8").splitlines()[-1].endswith("the node has left")
    assert find_nodes(cluster.address, going.node_id) == []
