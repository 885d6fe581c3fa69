"""The look at a stored file: it is there, a file, and as large as its entry says."""

from __future__ import annotations

from elastrata_pipelines.checked_json import file_size
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format.manifest import FileEntry
from elastrata_pipelines.storage import Storage


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
