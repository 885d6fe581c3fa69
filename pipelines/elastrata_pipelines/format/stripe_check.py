"""What the rows of a stripe must hold to, so that no reader of them can go wrong."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastrata_pipelines.format.binary_column import offsets_of, values_of
from elastrata_pipelines.format.manifest import Manifest

_OFFSET_BYTES = 4


def stripe_problem(table: pa.Table, manifest: Manifest) -> str | None:
    """What is wrong with the rows of a stripe, in one line; None: nothing.

    Args:
        table: with the columns of a shard, a chunk each.
        manifest: of the data set.
    """
    columns = {name: table[name].chunk(0) for name in table.column_names}
    if any(column.null_count for column in columns.values()):
        return "a value is missing"
    lengths = columns["length"].to_numpy()
    if not 0 < int(lengths.min()) <= int(lengths.max()) <= manifest.seq_len:
        return f"a length is not from 1 to {manifest.seq_len}"
    token_bytes = np.dtype(manifest.token_dtype).itemsize
    if not np.array_equal(np.diff(offsets_of(columns["tokens"])), lengths * np.int64(token_bytes)):
        return "a sample has not as many tokens as its length says"
    largest = int(values_of(columns["tokens"], manifest.token_dtype).max())
    if largest >= manifest.vocabulary.size:
        return f"token {largest} is not in the vocabulary of {manifest.vocabulary.size} ids"
    if "boundaries" in columns and not _are_inside(columns["boundaries"], lengths):
        return "a document inside a sample begins outside it, or before the one before it"
    if "second_start" in columns:
        starts = columns["second_start"].to_numpy()
        if not np.all((starts > 0) & (starts < lengths)):
            return "a second sentence begins outside its sample"
    return None


def _are_inside(boundaries: pa.LargeBinaryArray, lengths: npt.NDArray[np.int32]) -> bool:
    """Whether the documents of every sample begin behind its first token, one after another."""
    sizes = np.diff(offsets_of(boundaries))
    if np.any(sizes % _OFFSET_BYTES):
        return False
    rows = np.repeat(np.arange(len(lengths)), sizes // _OFFSET_BYTES)
    begins = values_of(boundaries, "int32")
    ascends = (np.diff(begins) > 0) | (np.diff(rows) > 0)
    return bool(np.all((begins > 0) & (begins < lengths[rows])) and np.all(ascends))
