"""Commits: complete checkpoints, each marked by a file that is written last."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, Annotated, Any, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from elastrata_pipelines.checked_json import list_names, parse_json, read_bytes
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


class CommitStorage(Protocol):
    """Files below a root, each written atomically: on disk, in an object store, or in memory.

    See `elastrata_pipelines.storage.Storage` for the methods.
    """

    @property
    def url(self) -> str:
        """Name of the root in messages."""
        ...

    def uri(self, *parts: str) -> str:
        """Return the name of a path below the root in messages."""
        ...

    def names(self, *parts: str) -> list[str]:
        """Return the names directly below a folder, sorted, by a fresh listing."""
        ...

    def exists(self, *parts: str) -> bool:
        """Return whether a file or folder exists, by a fresh look."""
        ...

    def size(self, *parts: str) -> int:
        """Return the bytes of a file, by the last listing if there was one."""
        ...

    def sha256(self, *parts: str) -> str:
        """Return the SHA-256 of a file, as `sha256sum` prints it."""
        ...

    def read(self, *parts: str) -> bytes:
        """Return all bytes of a file."""
        ...

    def open(self, *parts: str) -> Any:
        """Open a file for reading, seekable."""
        ...

    def write(self, data: bytes, *parts: str) -> None:
        """Write a file atomically."""
        ...

    def create(self, *parts: str) -> AbstractContextManager[IO[bytes]]:
        """Open a new file that appears, complete, when the block ends without error."""
        ...

    def delete(self, *parts: str) -> None:
        """Delete a file, or a folder with its contents."""
        ...


FORMAT_VERSION = 1
MARKER = "commit.json"
METADATA = ".metadata"
"""DCP's index of the tensors in the other files, which are unreadable without it."""
ATTEMPT = "attempt"
"""Key in `Commit.extra` of the attempt that the folder's name holds."""
FRESH_OPTIMIZER = "fresh_optimizer"
"""Key in `Commit.extra` that marks a commit whose run has changed its optimizer: the saved
optimizer state is not restored."""
EVALUATION_LOSS = "evaluation_loss"
"""Key in `Commit.extra` of the loss that decides which commit is best; smaller is better."""
EVALUATION = "evaluation"
"""Key in `Commit.extra` of all metrics of that step's evaluation."""
_FOLDER = re.compile(r"(?P<step>\d{9})-(?P<attempt>\d{4}|[1-9]\d{4,})-(?P<token>[0-9a-f]{6})")
_VERIFY_THREADS = 8


@dataclass(frozen=True, order=True)
class FolderName:
    """Name of a commit's folder. Later names sort higher: by attempt, then by step.

    An attempt is one lifetime of a group of workers. If a later attempt resumes from an earlier
    step, the run's history continues there, so its commits rank above those that it left behind.
    """

    attempt: int
    """1 for the first group of workers that saved into this storage, then 2..."""
    step: int
    token: str
    """Random, so that two attempts that start at the same moment never share a folder."""

    def __str__(self) -> str:
        return f"{self.step:09d}-{self.attempt:04d}-{self.token}"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Return the parts of a folder's name, or None if it is not the name of a commit's
        folder."""
        found = _FOLDER.fullmatch(name)
        if not found:
            return None
        return cls(int(found["attempt"]), int(found["step"]), found["token"])


class FileRecord(BaseModel):
    """Size and checksum that a file of a commit must have."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size: NonNegativeInt
    """Bytes."""
    sha256: str | None
    """As `sha256sum` prints it; None if it was not computed, as for in-memory checkpoints."""


class Commit(BaseModel):
    """A complete checkpoint, as described by its marker."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    folder: str = Field(exclude=True)
    """Name of the folder. Not in the marker, which is in that folder."""
    format_version: int = FORMAT_VERSION
    step: Annotated[NonNegativeInt, Field(le=2**53)]
    """Optimizer steps done."""
    samples: Annotated[NonNegativeInt, Field(lt=2**63)]
    """Samples seen, over all workers."""
    tokens: Annotated[NonNegativeInt, Field(lt=2**63)]
    """Tokens seen, over all workers."""
    extra: dict[str, Any]
    """JSON: recipe digest, manifest fingerprint, world size, evaluation loss..."""
    files: dict[Annotated[str, Field(pattern=r"^[^/\\]+$")], FileRecord]
    """Every file of the commit except the marker, by its name in the folder."""

    @property
    def place(self) -> tuple[int, int]:
        """Attempt and step: the position in the run's history."""
        name = FolderName.parse(self.folder)
        assert name is not None, self.folder
        return name.attempt, name.step

    @property
    def evaluation_loss(self) -> float | None:
        """Evaluation loss of this step; None if it was not evaluated."""
        loss = self.extra.get(EVALUATION_LOSS)
        return float(loss) if isinstance(loss, int | float) else None

    @property
    def evaluation(self) -> dict[str, float]:
        """Metrics of this step's evaluation, by name; empty if it was not evaluated."""
        reported = self.extra.get(EVALUATION)
        metrics = reported if isinstance(reported, dict) else {}
        return {name: float(v) for name, v in metrics.items() if isinstance(v, int | float)}

    def to_json(self) -> bytes:
        """Return the marker's bytes, which end with a digest of the other keys."""
        content = json.loads(self.model_dump_json())
        return json.dumps({**content, "digest": _digest(content)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, folder: str) -> Self:
        """Read the marker found in `folder`.

        Raises:
            ValueError: it is not a marker, has another format version, or is altered; says which.
        """
        try:
            content = parse_json(data, MARKER)
        except UserError:
            raise ValueError("is not JSON (truncated or altered)") from None
        if not isinstance(content, dict):
            raise ValueError("is not a JSON object")
        # The version first: another one may compute its digest differently.
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"has format version {version!r:.20}, expected {FORMAT_VERSION}")
        if content.pop("digest", None) != _digest(content):
            raise ValueError("does not match its own digest (altered)")
        try:
            found = cls.model_validate({**content, "folder": folder})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"has a bad '{where}': {first['msg']}") from None
        if problem := found._folder_mismatch():
            raise ValueError(problem)
        return found

    def _folder_mismatch(self) -> str:
        """Return why the marker belongs to another folder; empty if it does not."""
        name = FolderName.parse(self.folder)
        if name is None:
            return ""
        if name.step != self.step:
            return f"belongs to another step, {self.step} (a copy)"
        # A copied folder would otherwise count as a commit of the attempt in its name.
        if (attempt := self.extra.get(ATTEMPT, name.attempt)) != name.attempt:
            return f"belongs to another attempt, {attempt} (a copy)"
        return ""


def _digest(content: dict[str, Any]) -> str:
    # Canonical, so that the digest does not depend on the order of keys or on white space.
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def list_folders(storage: CommitStorage) -> list[FolderName]:
    """Return the folders of all commits, complete or not, newest first."""
    names = list_names(storage) if isinstance(storage, Storage) else storage.names()
    named = map(FolderName.parse, names)
    return sorted((name for name in named if name), reverse=True)


def list_commits(storage: CommitStorage) -> list[Commit]:
    """Return all commits with a readable marker, newest first, without a look at their files."""
    return [found for found in read_markers(storage).values() if isinstance(found, Commit)]


def read_markers(storage: CommitStorage) -> dict[str, Commit | str]:
    """Return by folder, newest first, the commit or the problem with its marker. Folders without a
    marker are left out."""
    read = ((str(name), _read(storage, str(name))) for name in list_folders(storage))
    return {folder: found for folder, found in read if found is not None}


def find_newest_verified(
    storage: CommitStorage,
    warn: Callable[[str], None],
    counts: Callable[[int, int], bool] = lambda attempt, step: True,
) -> Commit | None:
    """Return the newest commit whose files all have the size and SHA-256 in its marker.

    Args:
        storage: the run's folder of checkpoints.
        warn: called with one line for every newer commit that is skipped as damaged.
        counts: whether a commit of that attempt and step belongs to the run's history; others are
            skipped silently.

    Returns:
        The commit, or None if there are no commits.

    Raises:
        UserError: there are commits, but all are damaged; one line for each.
    """
    bad: list[str] = []
    for name in list_folders(storage):
        folder = str(name)
        found = _read(storage, folder) if counts(name.attempt, name.step) else None
        if found is None:
            continue
        problem = found if isinstance(found, str) else _summary(file_problems(storage, found))
        # Warned only now: if all are damaged, the lines are the error instead.
        if isinstance(found, Commit) and not problem:
            for line in bad:
                warn(f"{line}; falling back to the checkpoint of step {found.step}")
            return found
        bad.append(f"checkpoint {storage.uri(folder)}: {problem}")
    if bad:
        raise UserError(*bad)
    return None


def file_problems(storage: CommitStorage, commit: Commit) -> list[str]:
    """Return one line per file that is missing, truncated, altered or unreadable."""
    if METADATA not in commit.files:
        return [f"{METADATA} is missing in {MARKER}"]
    # Sizes first: one listing finds most damage without reading a byte.
    if wrong := size_problems(storage, commit):
        return wrong
    with ThreadPoolExecutor(_VERIFY_THREADS) as pool:
        checked = pool.map(lambda name: _content_problem(storage, commit, name), commit.files)
        return [problem for problem in checked if problem]


def size_problems(storage: CommitStorage, commit: Commit) -> list[str]:
    """Return one line per file that is missing or has another size, by one listing of the
    folder."""
    try:
        sizes = _sizes(storage, commit)
    except Exception as error:  # errors of remote file systems have no common class
        return [f"cannot be listed ({error})"]
    found = ((name, sizes.get(name), record.size) for name, record in commit.files.items())
    return [
        _size_problem(name, size, expected) for name, size, expected in found if size != expected
    ]


def _read(storage: CommitStorage, folder: str) -> Commit | str | None:
    """Return a folder's commit, the problem with its marker, or None if it has no marker."""
    try:
        return Commit.from_json(_marker(storage, folder), folder)
    except FileNotFoundError:
        return None
    except UserError as error:
        return error.problems[0].removeprefix(f"{storage.uri(folder)}/")
    except ValueError as error:
        return f"{MARKER} {error}"
    except Exception as error:
        return f"{MARKER} cannot be read ({error})"


def _marker(storage: CommitStorage, folder: str) -> bytes:
    if isinstance(storage, Storage):  # others are in memory and hold our files only
        return read_bytes(storage, folder, MARKER)
    return storage.read(folder, MARKER)


def _sizes(storage: CommitStorage, commit: Commit) -> dict[str, int]:
    """Return the bytes of every existing file of a commit, by name."""
    present = commit.files.keys() & storage.names(commit.folder)
    return {name: storage.size(commit.folder, name) for name in present}


def _size_problem(name: str, size: int | None, expected: int) -> str:
    if size is None:
        return f"{name} is missing"
    if size < expected:
        return f"{name} is truncated ({size} of {expected} bytes)"
    return f"{name} is altered ({size} bytes, expected {expected})"


def _content_problem(storage: CommitStorage, commit: Commit, name: str) -> str | None:
    expected = commit.files[name].sha256
    if expected is None:
        return None
    try:
        digest = storage.sha256(commit.folder, name)
    except Exception as error:
        return f"{name} cannot be read ({error})"
    if digest == expected:
        return None
    return f"{name} is altered (SHA-256 {digest[:12]}..., expected {expected[:12]}...)"


def _summary(lines: list[str]) -> str:
    """Return the first problem and the number of others; empty if there are none."""
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return lines[0] + more if lines else ""
