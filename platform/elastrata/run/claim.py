"""The folder of a run, a sweep or a data set: its kind, its exclusive use, and its name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from elastrata.run.folder import GIVEN_FILE, RECIPE_FILE, RUN_FILE
from elastrata.run.ownership import DRIVER_FILE, Ownership, own_run
from elastrata.run.status import State, status
from elastrata_pipelines.checked_json import describe_error, list_names
from elastrata_pipelines.errors import UserError, format_command, suggest_nearest
from elastrata_pipelines.format.manifest import BUILDING, MANIFEST, SHARDS
from elastrata_pipelines.storage import Storage

Kind = Literal["run", "sweep", "data set", "exported model"]
SWEEP_FILE, TRIALS = "sweep.yaml", "trials"
MARKERS = {"run": RUN_FILE, "sweep": SWEEP_FILE}
"""The file that makes a folder a run or a sweep, written last when the folder is created."""
EXPORTING = ".export-"
"""Prefix of the temporary folder that an export fills."""
_TEMPORARY = re.compile(r".*\.[0-9a-f]{8}\.tmp")
"""Files left by a process that was killed while writing them."""


def folder_kind(folder: Storage) -> Kind | Literal["nothing", "other files"]:
    """Return the kind of a folder, judged by the names in it.

    `nothing` includes a run or sweep whose command was killed before its first step.

    Raises:
        UserError: the folder cannot be read.
    """
    return _kind_of(_names(folder))


def check_folder(folder: Storage, kind: Kind, key: str = "name") -> None:
    """Check that a folder is empty or already holds something of the given kind.

    Args:
        folder: the folder that a command will write to.
        kind: the kind that the command creates or continues.
        key: key of the recipe or option that names the folder.

    Raises:
        UserError: one line that describes the folder's content.
    """
    names = _names(folder)
    found = _kind_of(names)
    if found in (kind, "nothing"):
        return
    what = f"is {with_article(found)}" if found in get_args(Kind) else f"holds {_name_some(names)}"
    name = folder.uri().rpartition("/")[2]
    raise UserError(
        f"{key}: {name}: {folder.uri()} {what}, not {with_article(kind)}; choose another one"
    )


def check_parent(folder: Storage, key: str = "storage") -> None:
    """Check that a folder is not itself a run, sweep, data set or exported model.

    Args:
        folder: the folder that will hold others.
        key: key of the recipe or option that names the folder.

    Raises:
        UserError: it is one of them.
    """
    found = folder_kind(folder)
    if found in get_args(Kind):
        raise UserError(f"{key}: {folder.uri()}: is {with_article(found)}; choose another folder")


def check_local(out: Path, option: str = "--out") -> None:
    """Check that an output path is local.

    Raises:
        UserError: `out` is a URL.
    """
    # `Path` takes a URL for a local folder such as `s3:`.
    if url := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", str(out)):
        slashes = "///" if url[1] == "file" else "//"  # `Path` keeps only one slash
        address = re.sub(r"^[^/]*:/+", f"{url[1]}:{slashes}", str(out))
        raise UserError(
            f"{option}: {address}: expected a local folder or file; write it there, then copy it"
        )


@contextmanager
def claim(
    folder: Storage,
    kind: Kind,
    *,
    lost: Callable[[str], None],
    warn: Callable[[str], None] = lambda _: None,
) -> Iterator[Ownership]:
    """Run the block as the only command that writes to a folder; see `own_run`.

    If the block leaves nothing in the folder, the folder is removed, with the parent folders that
    were created for it.

    Raises:
        UserError: the folder holds something else, or another command works in it.
    """
    check_folder(folder, kind)
    ownership: Ownership | None = None
    with folder.removing_empty_folders():
        try:
            # Checked again under the claim, as another command may have written meanwhile.
            with own_run(folder, lost=lost, warn=warn) as ownership:
                check_folder(folder, kind)
                yield ownership
        finally:
            # A run that was lost belongs to another driver, which may be about to write.
            if ownership and not ownership.is_lost and folder.names() == [DRIVER_FILE]:
                folder.delete()


def with_article(kind: str) -> str:
    """Return the kind with its article: `a run`, `an exported model`."""
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def is_copy(folder: Storage, original: str, identify: Callable[[Storage], str | None]) -> bool:
    """Return whether a folder was copied from another folder that still exists.

    Args:
        folder: a folder claimed by this process.
        original: recorded location of the run or sweep.
        identify: reads the id that a copy shares with its original.
    """
    other = Storage(original)
    try:
        same_id = identify(other) is not None and identify(other) == identify(folder)
        # Two paths to one folder, through a link or a second mount, show this process's claim.
        return same_id and _raw_token(other) != _raw_token(folder)
    except Exception:  # an unreadable location holds no original that matters here
        return False


def _raw_token(folder: Storage) -> str | None:
    """Return the token in the driver's file, even if the file was copied."""
    if not folder.exists(DRIVER_FILE):
        return None
    # Not `read_owner`, which reports the file of a copy as released.
    return str(json.loads(folder.read(DRIVER_FILE))["token"])


def _names(folder: Storage) -> set[str]:
    try:
        if folder.is_local and Path(folder.path()).is_file():
            raise UserError(f"{folder.uri()}: is a file, expected a folder or a new name")
        return {name for name in folder.names() if not _TEMPORARY.fullmatch(name)}
    except UserError:
        raise
    except Exception as error:  # storage backends have no common error type
        raise UserError(f"{folder.uri()}: cannot be read ({describe_error(error)})") from None


def _kind_of(names: set[str]) -> Kind | Literal["nothing", "other files"]:
    """Return the kind of a folder with these names."""
    if MARKERS["run"] in names:
        return "run"
    if MARKERS["sweep"] in names:
        return "sweep"
    if BUILDING in names or {MANIFEST, SHARDS} <= names:
        return "data set"
    # An export that was killed leaves its temporary folder.
    if any(name.startswith(EXPORTING) for name in names):
        return "exported model"
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return "exported model"
    visible_names = {name for name in names if not name.startswith(".")}
    # A recipe is written just before the marker of its folder: a kill in between leaves only the
    # recipe.
    recipes = {RECIPE_FILE, GIVEN_FILE} if DRIVER_FILE in names else set()
    return "nothing" if visible_names <= {DRIVER_FILE} | recipes else "other files"


def _name_some(names: set[str]) -> str:
    """Return the first names, for messages."""
    return f"other files ({', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''})"


RUNS = "runs"
"""Default folder of runs in recipes."""
_THREADS = 8


def find_run_folder(name: str, storage: str = RUNS) -> Storage:
    """Return the folder of a run.

    Args:
        name: the run's folder, URL or name.
        storage: folder in which names are looked up.

    Raises:
        UserError: there is no such run; the message suggests the nearest name.
    """
    here = Storage(name)
    # A folder of that name has precedence over a run in `storage`.
    if "://" in name or here.exists(RUN_FILE):
        return here
    if "/" in name:
        raise UserError(f"{here.uri()}: no run here ({RUN_FILE} is missing){_hint(here)}")
    run = Storage(storage).sub(name)
    if run.exists(RUN_FILE):
        return run
    names = run_names(Storage(storage))
    raise UserError(
        f"{name}: no run here ({RUN_FILE} is missing), and none of that name in "
        f"{Storage(storage).uri()}{_hint(run) or _hint(here) or suggest_nearest(name, names)}"
    )


def _hint(folder: Storage) -> str:
    """Return a description of the folder, to append to the message that it is not a run."""
    found = folder_kind(folder)
    if found == "sweep":
        return f"; it is a sweep, and its trials are the runs in {folder.uri(TRIALS)}"
    return "" if found in ("nothing", "other files", "run") else f"; it is {with_article(found)}"


def find_driven_folder(name: str) -> Storage:
    """Return the folder of a run or a sweep that may have a driver, even one that just starts.

    Args:
        name: its folder, URL or name.

    Raises:
        UserError: there is no such folder, or it is the trial of a sweep.
    """
    places = [Storage(name), *([] if "/" in name else [Storage(RUNS).sub(name)])]
    folder = next((place for place in places if place.exists(DRIVER_FILE)), None)
    folder = folder or find_run_folder(name)
    sweep, is_below, _ = folder.uri().rpartition(f"/{TRIALS}/")
    if is_below and Storage(sweep).exists(SWEEP_FILE):
        command = format_command("elastrata", "stop", sweep)
        raise UserError(
            f"{folder.uri()}: a trial, which its sweep would start again; stop the sweep: {command}"
        )
    return folder


def find_model(model: str) -> str:
    """Return the folder or URL of a model: of a run, possibly given by its name, or of an export.

    Raises:
        UserError: it is a name of which no run exists.
    """
    is_name = "/" not in model and not Storage(model).exists()
    return find_run_folder(model).url if is_name else model


def run_names(storage: Storage) -> list[str]:
    """Return the sorted names of the runs in a folder.

    Raises:
        UserError: the folder cannot be read.
    """
    return [name for name in list_names(storage) if storage.exists(name, RUN_FILE)]


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run in a list. The field names are keys of `elastrata runs --json`."""

    name: str
    url: str
    state: State | None
    """None if the run cannot be read."""
    steps: int
    steps_in_all: int
    loss: float | None
    """Training loss of the last step."""
    workers: int
    """Number of workers in its newest group."""
    seen: float | None
    """Unix time of its last sign of life."""
    text: str
    """The state as text, or why it cannot be read."""
    problems: tuple[str, ...] = ()
    """See `Status.problems`."""


def list_runs(storage: Storage) -> Sequence[ListedRun]:
    """Return the runs in a folder, sorted by their last sign of life, newest first."""
    # Reading runs is dominated by the latency of storage.
    with ThreadPoolExecutor(_THREADS) as pool:
        listed = list(pool.map(partial(_list_entry, storage), run_names(storage)))
    return sorted(listed, key=lambda run: (-(run.seen or 0.0), run.name))


def _list_entry(storage: Storage, name: str) -> ListedRun:
    """Return a run as a list shows it, even if it cannot be read."""
    run = storage.sub(name)
    try:
        current = status(run)
    except UserError as error:
        return ListedRun(
            # One damaged run must not hide the others.
            name=name, url=run.uri(), state=None, steps=0, steps_in_all=0, loss=None, workers=0,
            seen=None, text=error.problems[0],
        )  # fmt: skip
    return ListedRun(
        name=name,
        url=run.uri(),
        state=current.state,
        steps=current.steps,
        steps_in_all=current.steps_in_all,
        loss=current.loss,
        workers=current.world_sizes[-1].world_size if current.world_sizes else 0,
        seen=current.seen,
        text=current.text,
        problems=current.problems,
    )
