"""The Ray session of a command: a cluster of its own on this machine, or the one it was sent to."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from elastrata.cluster.interrupt import undisturbed
from elastrata.cluster.ray_processes import MARK, NICENESS, Session, guarded, new_session
from elastrata_pipelines.errors import UserError

_SECONDS_TO_ANSWER = 5.0
_NOISY_LOGGERS = ("ray", "ray.data", "ray.train", "ray.tune")
_EXPECTED_MESSAGES = ("worker processes have been started on node",)
"""That is how spares come to be."""
_MESSAGE_CHARACTERS = 160


@contextmanager
def ray_session(
    address: str | None = None, *, num_cpus: int | None = None, log_to_driver: bool = False
) -> Iterator[None]:
    """Runs its block with Ray, and ends what it started. A session that is open is used as it is.

    Args:
        address: `auto` or the address of a cluster to join. Default: the one that
            `ray job submit` names, else a new cluster on this machine, never one that happens to
            run here.
        num_cpus: logical CPUs of a new cluster; default: those of the machine.
        log_to_driver: whether to show what workers print.

    Raises:
        UserError: there is no cluster at the address.
    """
    _quiet_settings()
    import ray

    if ray.is_initialized():
        yield
        return
    wanted = address or os.environ.get("RAY_ADDRESS") or "local"
    with _brief_messages():
        if wanted == "local":
            with _local_cluster(num_cpus, log_to_driver):
                yield
        else:
            with _joined_cluster(wanted, log_to_driver):
                yield


@contextmanager
def _joined_cluster(wanted: str, log_to_driver: bool) -> Iterator[None]:
    import ray

    try:
        _check_answers(wanted)
        ray.init(address=wanted, log_to_driver=log_to_driver, logging_level=logging.ERROR)
    except OSError as error:  # refused, timed out, no such host
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--address: {wanted}: no Ray cluster answers there ({reason})") from error
    _quiet_loggers()
    try:
        yield
    finally:
        with undisturbed("leaving Ray"):
            ray.shutdown()


@contextmanager
def _local_cluster(num_cpus: int | None, log_to_driver: bool) -> Iterator[None]:
    """A cluster of one node. Its logs are kept only where the block fails unexpectedly."""
    session = new_session()
    keep = False
    with guarded(session):
        try:
            with _own_node(session, num_cpus, log_to_driver):
                yield
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:
            keep = True
            error.add_note(f"Ray's logs: {session.folder / 'session_latest' / 'logs'}")
            raise
        finally:
            with undisturbed("ending Ray"):
                session.end()
                session.remove(logs=not keep)


@contextmanager
def _own_node(session: Session, num_cpus: int | None, log_to_driver: bool) -> Iterator[None]:
    import ray

    from elastrata.cluster.ray_head import kept_alive, settings

    environment = partial(_environment, session)
    with environment():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=log_to_driver,
            logging_level=logging.ERROR,
            _temp_dir=str(session.folder),
            _system_config=settings(session.memory, session.folder / "head"),
        )
    _quiet_loggers()
    with kept_alive(environment):
        yield


@contextmanager
def _environment(session: Session) -> Iterator[None]:
    """The environment that Ray's processes inherit: the session's mark, and a priority like that of
    all others, without which reading data waits for whatever else runs on the machine."""
    before = dict(os.environ)
    os.environ.setdefault(NICENESS, "0")
    os.environ[MARK] = session.mark
    try:
        yield
    finally:
        for name in (MARK, NICENESS):
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def _check_answers(address: str) -> None:
    """Raises at once where nobody listens: Ray itself would try for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), _SECONDS_TO_ANSWER).close()


def _quiet_settings() -> None:
    """Ray reads these when it is imported; what the user has set stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


@contextmanager
def _brief_messages() -> Iterator[None]:
    """Trouble in the cluster, of which Ray tells every driver in pages of logs, takes one line."""
    from elastrata.cluster.ray_internals import replace_printer

    def briefly(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        if data["pid"] != "raylet":
            in_full(data, ignore_prefix)
            return
        message = " ".join(data["lines"]).strip()
        if not any(expected in message for expected in _EXPECTED_MESSAGES):
            line = message.partition("\n")[0]
            print(f"ray: {line[:_MESSAGE_CHARACTERS]}", file=sys.stderr, flush=True)

    in_full = replace_printer(briefly)
    try:
        yield
    finally:
        replace_printer(in_full)


def _quiet_loggers() -> None:
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
