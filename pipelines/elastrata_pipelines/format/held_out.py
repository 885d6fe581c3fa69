"""The held-out data set: it lies inside the one it was held out of, which vouches for it."""

from __future__ import annotations

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format.manifest import AGAIN, MANIFEST, Manifest
from elastrata_pipelines.storage import Storage

HELD_OUT = "held_out"
"""Where `prepare` puts it."""


def read_held_out(storage: Storage, manifest: Manifest) -> Manifest | None:
    """The manifest of what was held out of a data set; None where nothing was.

    Args:
        storage: the data set.
        manifest: its own. One of version 1 does not say what was held out: it is what is there.

    Raises:
        UserError: it is not what the manifest says: missing, another one, damaged, or not told of.
    """
    folder = storage.sub(HELD_OUT)
    where, beside = folder.uri(MANIFEST), storage.uri(MANIFEST)
    found = Manifest.find(folder)
    told = manifest.held_out
    if manifest.version == 1 or (found and found.fingerprint == told):
        return found
    if found and told:
        problem = f"{where}: not the data that was held out: its checksum is not that in {beside}"
    elif told:
        problem = f"{where}: missing, but {beside} says that data was held out"
    elif found:
        raise UserError(
            f"{where}: {beside} does not say that data was held out; delete this folder, or move "
            "it elsewhere and name it in evaluation.path"
        )
    else:
        return None
    raise UserError(f"{problem}; bring it back, or {AGAIN}")
