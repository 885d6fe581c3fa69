"""The look at a stored file: it is there, a file, and as large as its entry says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from elastrata_pipelines.checked_json import file_size
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format.manifest import FileEntry, Manifest
from elastrata_pipelines.storage import Storage

_REMOTE_FILES_AT_ONCE = 16


def file_problems(storage: Storage, manifest: Manifest) -> list[str]:
    """What is wrong with the files of a data set, by their sizes alone."""
    look = partial(file_problem, storage)
    if storage.is_local:
        found = [look(entry) for entry in manifest.files]
    else:
        with ThreadPoolExecutor(_REMOTE_FILES_AT_ONCE) as threads:
            found = list(threads.map(look, manifest.files))
    return [problem for problem in found if problem]


def file_problem(storage: Storage, entry: FileEntry) -> str | None:
    """What is wrong with a file of a data set, by its size alone, in one line; None: nothing."""
    where = storage.uri(entry.path)
    try:
        size = file_size(storage, entry.path)
    except FileNotFoundError:
        return f"{where}: missing"
    except UserError as error:
        return str(error)
    return (
        None if size == entry.bytes else f"{where}: {size} bytes, the manifest says {entry.bytes}"
    )
