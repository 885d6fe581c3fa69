"""`elastrata guard`: a small process on every spot machine."""

from __future__ import annotations

import signal
import sys
import time
from threading import Event
from typing import Annotated

import typer

from elastrata_pipelines.errors import UserError, nearest


def guard(
    cloud: Annotated[
        str | None, typer.Option(help="Whose notices to wait for: aws, gcp or azure.")
    ] = None,
    now: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Do not wait: this machine will be gone in so many seconds. As a pod's preStop.",
        ),
    ] = None,
    on_sigterm: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="SIGTERM, too, is a notice, of so many seconds.",
        ),
    ] = 0.0,
    every: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How often to ask.")
    ] = 2.0,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster. Default: that of the Ray which runs here.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="Id of the Ray node. Default: all of this machine's address.")
    ] = None,
    metadata: Annotated[
        str | None, typer.Option(help="URL of the metadata server. Default: the cloud's own.")
    ] = None,
) -> None:
    """Turn a notice that this machine will be taken away into a drain of its Ray node."""
    from elastrata.deploy.guard import drain, wait_for_notice, wait_until_gone
    from elastrata.deploy.notices import CLOUDS, Notice

    if cloud is not None and cloud not in CLOUDS:
        expected = f"expected one of {', '.join(CLOUDS)}"
        raise UserError(f"--cloud: {cloud}: {expected}{nearest(cloud, CLOUDS)}")
    if cloud is None and now is None and not on_sigterm:
        raise UserError("expected --cloud, --on-sigterm or --now: what to wait for")
    ended = Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    notice = None
    if now is not None:
        notice = Notice("this machine is to be stopped", time.time() + now)
    elif cloud is not None:
        ask, url = CLOUDS[cloud]
        _say(f"waiting for notices of {cloud}")
        notice = wait_for_notice(
            ask((metadata or url).rstrip("/")), ended, seconds_between=every, say=_say
        )
    else:
        _say("waiting for SIGTERM")
        ended.wait()
    is_waiting = now is not None
    if notice is None and on_sigterm:
        notice = Notice("SIGTERM", time.time() + on_sigterm)
        is_waiting = True
    if notice is None:
        return
    nodes = drain(notice, address=address, node_id=node, say=_say)
    if nodes is None:
        raise typer.Exit(1)
    if is_waiting:  # whoever stops this machine waits for this process
        is_gone = wait_until_gone(nodes, notice.time)
        _say("the node has gone" if is_gone else "the time is over, and the node is still there")


def _say(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {line}\n")
    sys.stderr.flush()
