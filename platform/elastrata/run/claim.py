"""The folder of a run, a sweep or a data set: what it holds, whose it is, and its name."""

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

from elastrata.run.folder import RECIPE_FILE, RUN_FILE
from elastrata.run.ownership import DRIVER_FILE, Ownership, own_run
from elastrata.run.status import State, status
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.format.manifest import BUILDING, MANIFEST, SHARDS
from elastrata_pipelines.storage import Storage

Kind = Literal["run", "sweep", "data set", "exported model"]
SWEEP_FILE, TRIALS = "sweep.yaml", "trials"
MARKERS = {"run": RUN_FILE, "sweep": SWEEP_FILE}
"""The file that makes a folder what it is, the last that is written of its first ones."""
EXPORTING = ".export-"
"""The prefix of the folder that an export fills before it is whole."""
_TEMPORARY = re.compile(r".*\.[0-9a-f]{8}\.tmp")
"""What a process leaves that is killed while it writes a file."""


def folder_kind(folder: Storage) -> Kind | Literal["nothing", "other files"]:
    """Return what a folder holds, by the names in it.

    `nothing` includes a run or sweep whose command was killed before its first step.

    Raises:
        UserError: the folder cannot be read.
    """
    return _kind_of(_names(folder))


def check_folder(folder: Storage, kind: Kind, key: str = "name") -> None:
    """Refuse a folder that holds anything but `kind` or nothing.

    Args:
        folder: that a command is to write in.
        kind: what the command makes or continues there.
        key: of the recipe or option that names the folder.

    Raises:
        UserError: one line that says what is there.
    """
    names = _names(folder)
    found = _kind_of(names)
    if found in (kind, "nothing"):
        return
    what = f"is {with_article(found)}" if found in get_args(Kind) else f"holds {_some(names)}"
    name = folder.uri().rpartition("/")[2]
    raise UserError(
        f"{key}: {name}: {folder.uri()} {what}, not {with_article(kind)}; choose another one"
    )


def check_parent(folder: Storage, key: str = "storage") -> None:
    """Refuse to make folders inside a run, sweep, data set or exported model.

    Args:
        folder: that is to hold them.
        key: of the recipe or option that names it.

    Raises:
        UserError: it is one of them.
    """
    found = folder_kind(folder)
    if found in get_args(Kind):
        raise UserError(f"{key}: {folder.uri()}: is {with_article(found)}; choose another folder")


def check_local(out: Path, option: str = "--out") -> None:
    """Refuse a URL where only a folder of this machine can be written.

    Raises:
        UserError: `out` is a URL, which `Path` takes for a folder named `s3:`.
    """
    if url := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", str(out)):
        slashes = "///" if url[1] == "file" else "//"  # `Path` keeps one of them
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
    """Run the block as the only command that writes in a folder; see `own_run`.

    A folder in which the block leaves nothing is removed, and so are the folders above it that were
    made for it.

    Raises:
        UserError: the folder holds something else, or another command works in it.
    """
    check_folder(folder, kind)
    ownership: Ownership | None = None
    with folder.without_leftovers():
        try:
            with own_run(folder, lost=lost, warn=warn) as ownership:
                check_folder(folder, kind)
                yield ownership
        finally:
            if ownership and not ownership.is_lost and folder.names() == [DRIVER_FILE]:
                folder.delete()


def with_article(kind: str) -> str:
    """Return the kind as a sentence names it: `a run`, `an exported model`."""
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def is_copy(folder: Storage, original: str, identify: Callable[[Storage], str | None]) -> bool:
    """Return whether a folder was copied from another one that still exists.

    Args:
        folder: that this process has claimed.
        original: where the record says that the run or sweep is.
        identify: reads the id that a copy has in common with its original.
    """
    other = Storage(original)
    try:
        same_id = identify(other) is not None and identify(other) == identify(folder)
        # Two paths to one folder, through a link or a second mount, show this process's claim.
        return same_id and _raw_token(other) != _raw_token(folder)
    except Exception:  # a place that cannot be read from here holds no original for this command
        return False


def _raw_token(folder: Storage) -> str | None:
    if not folder.exists(DRIVER_FILE):
        return None
    return str(json.loads(folder.read(DRIVER_FILE))["token"])


def _names(folder: Storage) -> set[str]:
    try:
        if folder.is_local and Path(folder.path()).is_file():
            raise UserError(f"{folder.uri()}: is a file, expected a folder or a new name")
        return {name for name in folder.names() if not _TEMPORARY.fullmatch(name)}
    except UserError:
        raise
    except Exception as error:  # every store has exceptions of its own
        raise UserError(f"{folder.uri()}: cannot be read ({error})") from None


def _kind_of(names: set[str]) -> Kind | Literal["nothing", "other files"]:
    if MARKERS["run"] in names:
        return "run"
    if MARKERS["sweep"] in names:
        return "sweep"
    if BUILDING in names or {MANIFEST, SHARDS} <= names:
        return "data set"
    if any(name.startswith(EXPORTING) for name in names):
        return "exported model"
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return "exported model"
    shown = {name for name in names if not name.startswith(".")}
    # A recipe is written just before the file that says what the folder is: a kill can part them.
    begun = {DRIVER_FILE, RECIPE_FILE} if DRIVER_FILE in names else {DRIVER_FILE}
    return "nothing" if shown <= begun else "other files"


def _some(names: set[str]) -> str:
    return f"other files ({', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''})"


RUNS = "runs"
"""Where a recipe keeps its runs by default."""
_THREADS = 8


def named_run(name: str, storage: str = RUNS) -> Storage:
    """The folder of a run.

    Args:
        name: its folder or URL, or its name.
        storage: where runs of that name are looked for.

    Raises:
        UserError: there is no such run; names the nearest one.
    """
    here = Storage(name)
    if "://" in name or here.exists(RUN_FILE):
        return here
    if "/" in name:
        raise UserError(f"{here.uri()}: no run here ({RUN_FILE} is missing){_hint(here)}")
    under = Storage(storage).sub(name)
    if under.exists(RUN_FILE):
        return under
    known = run_names(Storage(storage))
    raise UserError(
        f"{name}: no run here ({RUN_FILE} is missing), and none of that name in "
        f"{Storage(storage).uri()}{_hint(under) or _hint(here) or nearest(name, known)}"
    )


def _hint(folder: Storage) -> str:
    """Return what the folder is, for the end of the line that says that it is no run."""
    found = folder_kind(folder)
    if found == "sweep":
        return f"; it is a sweep, and its trials are the runs in {folder.uri(TRIALS)}"
    return "" if found in ("nothing", "other files", "run") else f"; it is {with_article(found)}"


def place_of_model(model: str) -> str:
    """The folder or URL of a model: of a run, maybe by its bare name, or of an export.

    Raises:
        UserError: it is a bare name, and no run has it.
    """
    is_name = "/" not in model and not Storage(model).exists()
    return named_run(model).url if is_name else model


def run_names(storage: Storage) -> list[str]:
    """The names of the runs in a folder, sorted."""
    return [name for name in storage.names() if storage.exists(name, RUN_FILE)]


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run in a list. The field names are keys of `elastrata runs --json`."""

    name: str
    url: str
    state: State | None
    """None: it cannot be read."""
    steps: int
    steps_in_all: int
    loss: float | None
    """Training loss of the last step."""
    workers: int
    """Size of its newest group."""
    seen: float | None
    """Unix time of its last sign of life."""
    text: str
    """The state in words, or why it cannot be read."""
    problems: tuple[str, ...] = ()
    """As those of `status`."""


def list_runs(storage: Storage) -> Sequence[ListedRun]:
    """The runs in a folder, the one that gave a sign of life last first."""
    with ThreadPoolExecutor(_THREADS) as pool:
        listed = list(pool.map(partial(_listed, storage), run_names(storage)))
    return sorted(listed, key=lambda run: (-(run.seen or 0.0), run.name))


def _listed(storage: Storage, name: str) -> ListedRun:
    run = storage.sub(name)
    try:
        current = status(run)
    except UserError as error:
        return ListedRun(
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
