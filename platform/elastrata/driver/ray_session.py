"""The Ray session of a command: a new cluster on this machine, or one that it joins.

The processes of a new cluster end with the driver. Ray has Linux send SIGKILL to processes that the
driver has started (PR_SET_PDEATHSIG), and workers end within 3 s of their raylet. Only its two
agents try for 60 s to report the raylet's death first. Run as a program, this module is the watcher
that ends them.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, NoReturn

from elastrata.cluster.processes import children, title
from elastrata.driver.interrupt import shield_from_signals
from elastrata.driver.shadowing import check_search_path
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.waits import CONNECT_SECONDS, READ_SECONDS, check_port, waiting_for

NICENESS = "RAY_worker_niceness"
"""The environment variable with the nice value of Ray's workers."""
_SECONDS_BETWEEN_LOOKS = 1.0
_REFUSALS = 3
"""Consecutive refused connections after which one of Ray's processes counts as dead."""
_TRIES_TO_REMOVE = 5
_NOISY_LOGGERS = ("ray", "ray.data", "ray.train", "ray.tune")
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
_EXPECTED_MESSAGES = ("worker processes have been started on node",)
"""Messages that spares cause."""
_MESSAGE_CHARACTERS = 160


@contextmanager
def ray_session(
    address: str | None = None, *, num_cpus: int | None = None, log_to_driver: bool = False
) -> Iterator[None]:
    """Run the block with Ray, and end the session if it was opened here.

    An open session is used as it is.

    Args:
        address: `auto` or the address of a cluster to join. Default: the cluster that `ray job
            submit` names, else a new one on this machine, never one that happens to run here.
        num_cpus: logical CPUs of a new cluster; default: those of the machine.
        log_to_driver: True to show the output of workers.

    Raises:
        UserError: no cluster answers at the address, or a file of the current folder hides a
            module from the workers.
    """
    _quiet_settings()
    import ray

    if ray.is_initialized():
        yield
        return
    check_search_path()
    # As in `ray.init`, the variable says what `auto` means.
    variable = os.environ.get("RAY_ADDRESS") if address in (None, "auto") else None
    wanted = variable or address or "local"
    with _brief_messages():
        if wanted == "local":
            with _local_cluster(num_cpus, log_to_driver):
                yield
        else:
            source = "RAY_ADDRESS" if variable else "--address"
            with _joined_cluster(wanted, source, log_to_driver):
                yield


@contextmanager
def _joined_cluster(address: str, source: str, log_to_driver: bool) -> Iterator[None]:
    import ray

    where = f"{source}: {address}"
    try:
        _check_answers(address, where)
        with _keep_sigterm(), waiting_for(f"the Ray cluster at {address}"):
            ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.ERROR)
    except PermissionError as error:
        raise UserError(f"{where}: {describe_token(error)}") from error
    except OSError as error:  # refused, timed out, no such host
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{where}: no Ray cluster answers there ({reason})") from error
    _quiet_loggers()
    try:
        yield
    finally:
        with shield_from_signals("leaving Ray"):
            ray.shutdown()


@contextmanager
def _local_cluster(num_cpus: int | None, log_to_driver: bool) -> Iterator[None]:
    """Run a cluster of one node. Its logs are kept only if the block fails unexpectedly."""
    # Sockets are created below it, and their paths may have 107 characters at most.
    parent = "/tmp" if Path("/tmp").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=parent))
    keep = False
    try:
        with _own_node(folder, num_cpus, log_to_driver):
            yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        keep = True
        error.add_note(f"Ray's logs: {folder / 'session_latest' / 'logs'}")
        raise
    finally:
        if not keep:
            _remove(folder)


@contextmanager
def _keep_sigterm() -> Iterator[None]:
    """Run `ray.init`, and treat SIGTERM during and after it as before. If Python has no handler,
    Ray's stays, which lets blocks clean up.

    Raises:
        KeyboardInterrupt: the process's handler raised it.
    """
    import ray

    from elastrata.cluster.ray_internals import keep_sigterm_handler

    handler = signal.getsignal(signal.SIGTERM)
    is_ours = threading.current_thread() is threading.main_thread() and (
        callable(handler) or handler is signal.SIG_IGN
    )
    try:
        with keep_sigterm_handler() if is_ours else nullcontext():
            yield
    except KeyboardInterrupt:
        with shield_from_signals("ending Ray"):
            ray.shutdown()
        raise


@contextmanager
def _own_node(folder: Path, num_cpus: int | None, log_to_driver: bool) -> Iterator[None]:
    import ray

    with _fair_priority(), _keep_sigterm():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=log_to_driver,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
        )
    _quiet_loggers()
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid())]
    # In another session, Ctrl-C and the kill of a process group do not reach the watcher.
    watcher = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    is_over = Event()
    try:
        Thread(target=_watch_ray, args=(_addresses(), folder, is_over), daemon=True).start()
        yield
    finally:
        with shield_from_signals("ending Ray"):
            is_over.set()
            ray.shutdown()
            watcher.kill()
            watcher.wait()


def _remove(folder: Path) -> None:
    """Delete the session's files; retry, as ending workers may still write logs."""
    for _ in range(_TRIES_TO_REMOVE):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


@contextmanager
def _fair_priority() -> Iterator[None]:
    """Let workers run at the priority of all other processes."""
    # At Ray's default, 15, reading data waits for any other work on the machine.
    is_set = NICENESS in os.environ
    os.environ.setdefault(NICENESS, "0")
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(NICENESS, None)


def _addresses() -> dict[str, tuple[str, int]]:
    """Return the addresses of Ray's head process and its raylet."""
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    (node,) = ray.nodes()  # type: ignore[no-untyped-call]
    return {
        "head process": (host, int(port)),
        "raylet": (node["NodeManagerAddress"], node["NodeManagerPort"]),
    }


def _watch_ray(addresses: Mapping[str, tuple[str, int]], folder: Path, is_over: Event) -> None:
    """End this command when the head process or the raylet of its local cluster is dead."""
    import ray

    # Ray itself would end the driver a minute later, by an abort with pages of logs, and would wait
    # that long in its own shutdown.
    refusals = dict.fromkeys(addresses, 0)
    while not is_over.wait(_SECONDS_BETWEEN_LOOKS):
        for name, address in addresses.items():
            refusals[name] = refusals[name] + 1 if _refuses(address) else 0
            # Someone may have called `ray.shutdown` in the block.
            if refusals[name] == _REFUSALS and ray.is_initialized() and not is_over.is_set():
                _end_command(name, folder)


def _refuses(address: tuple[str, int]) -> bool:
    """Return True if no process listens at the address."""
    try:
        socket.create_connection(address, CONNECT_SECONDS).close()
    # A slow process, or a network that is away, does not refuse.
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _end_command(process: str, folder: Path) -> NoReturn:
    """End this process as a SIGKILL would."""
    sys.stderr.write(
        f"Ray has stopped (its {process} died; logs: {folder / 'session_latest' / 'logs'}); "
        "the same command continues the run\n"
    )
    with suppress(OSError, RuntimeError):
        sys.stdout.flush()
    # Every teardown would wait for the dead Ray.
    os._exit(1)


def describe_token(error: Exception) -> str:
    """Return, in one line, how to give the token that a cluster wants."""
    # Ray goes on with several sentences of advice.
    reason = str(error).strip().splitlines()[0].partition(". ")[0]
    return (
        f"the cluster requires a token ({reason}): set RAY_AUTH_MODE=token, and give the token in "
        "RAY_AUTH_TOKEN, in the file RAY_AUTH_TOKEN_PATH or in ~/.ray/auth_token"
    )


def _check_answers(address: str, where: str) -> None:
    """Check that a cluster answers and lets this process in, before `ray.init` tries for minutes.

    Args:
        address: address of the cluster.
        where: name of the address in messages.

    Raises:
        PermissionError: it wants another token.
        OSError: it does not answer.
        UserError: it is no address.
    """
    from elastrata.cluster.ray_internals import check_head, resolve_head

    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto" and not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(f"{where}: expected auto, local or HOST:PORT, such as 10.0.0.1:6379")
    if address != "auto":
        check_port(host.strip("[]"), int(port))
    # Ray's own client speaks to another process, which has no such question.
    if not address.startswith("ray://"):
        head = resolve_head(address)
        with waiting_for(f"the Ray cluster at {address}"):
            check_head(head, READ_SECONDS)


def _quiet_settings() -> None:
    """Set Ray's environment variables that the user has not set."""
    # Ray reads them when it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


@contextmanager
def _brief_messages() -> Iterator[None]:
    """Print each error in the cluster as one line."""
    from elastrata.cluster.ray_internals import replace_printer

    def briefly(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        if data["pid"] != "raylet":
            in_full(data, ignore_prefix)
            return
        message = " ".join(data["lines"]).strip()
        if not any(expected in message for expected in _EXPECTED_MESSAGES):
            line = message.partition("\n")[0]
            print(f"ray: {line[:_MESSAGE_CHARACTERS]}", file=sys.stderr, flush=True)

    # Ray sends pages of logs to every driver.
    in_full = replace_printer(briefly)
    try:
        yield
    finally:
        replace_printer(in_full)


def _quiet_loggers() -> None:
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def _end_agents(driver: int) -> None:
    """Kill the agents of the driver's raylet when the driver has died."""
    agents: list[Path] = []
    while os.getppid() == driver:
        # Found only once: a raylet never replaces an agent, but ends with it.
        if len(agents) < len(_AGENTS):
            below = (child for raylet in children(driver) for child in children(int(raylet.name)))
            agents = [process for process in below if title(process).startswith(_AGENTS)]
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    for process in agents:
        with suppress(OSError):
            if title(process).startswith(_AGENTS):
                os.kill(int(process.name), signal.SIGKILL)


if __name__ == "__main__":
    _end_agents(int(sys.argv[1]))
