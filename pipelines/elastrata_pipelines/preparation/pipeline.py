"""The pipeline: many processes by Ray Data. Nothing else in the preparation knows Ray."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from elastrata_pipelines.errors import UserError

if TYPE_CHECKING:
    from ray.data import Dataset

Item = TypeVar("Item")
Part = TypeVar("Part")
Result = TypeVar("Result")

# Reading waits for disks. Twice as many readers as CPUs, and no more: to start a process takes as
# long as to read 10,000 small files. Other than 1, so that Ray does not fuse it with work.
_READER_CPUS = 0.5


def run_in_parallel(items: Sequence[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
    """`work(item)` of each item, in any order, on all CPUs of the cluster.

    Raises:
        UserError: as raised by `work`, or where it cannot read or write files.
    """
    return _results(_stage(_source(items), _OneResult(work), num_cpus=1))


def split_in_parallel(
    items: Sequence[Item], split: Callable[[Item], Iterable[Part]], work: Callable[[Part], Result]
) -> Iterator[Result]:
    """`work(part)` of each part of each item, in any order, on all CPUs of the cluster.

    Parts pass from process to process; few exist at any time.

    Raises:
        UserError: as raised by `split` or `work`, or where they cannot read or write files.
    """
    parts = _stage(_source(items), split, num_cpus=_READER_CPUS)
    return _results(_stage(parts, _OneResult(work), num_cpus=1))


@dataclass(frozen=True)
class _OneResult:
    work: Callable[[Any], Any]

    def __call__(self, item: Any) -> tuple[Any]:
        return (self.work(item),)


@dataclass(frozen=True)
class _Failed:
    """A user's mistake on its way to the driver: as a value, so that Ray adds no traceback."""

    problems: tuple[str, ...]


@dataclass(frozen=True)
class _Stage:
    """The function of a task: rows of pickled values to rows of pickled values."""

    work: Callable[[Any], Iterable[Any]]

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        for value in _values(table):
            if isinstance(value, _Failed):
                yield _row(value)
                continue
            try:
                for result in self.work(value):
                    yield _row(result)
            except UserError as error:
                yield _row(_Failed(error.problems))
            except OSError as error:  # a full disk, a store that went away
                yield _row(_Failed((f"{type(error).__name__}: {error}",)))


def _row(value: Any) -> pa.Table:
    large: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=large.append)
    found = [buffer.raw() for buffer in large]
    buffers = pa.LargeListArray.from_arrays(pa.array([0, len(found)], pa.int64()), _binary(found))
    return pa.table({"value": _binary([data]), "buffers": buffers})


def _binary(values: Sequence[bytes | memoryview]) -> pa.LargeBinaryArray:
    """An array of values, of which a single one is not copied."""
    ends = pa.py_buffer(np.cumsum([0, *map(len, values)], dtype=np.int64))
    data = values[0] if len(values) == 1 else b"".join(values)
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(values), [None, ends, pa.py_buffer(data)]
    )


def _values(table: pa.Table) -> Iterator[Any]:
    for batch in table.to_batches():
        values, buffers = batch.columns
        large = _contents(buffers.values)
        for value, (begin, end) in zip(
            _contents(values), pairwise(buffers.offsets.to_pylist()), strict=True
        ):
            yield pickle.loads(value, buffers=large[begin:end])


def _contents(values: pa.LargeBinaryArray) -> list[memoryview]:
    """The bytes of all values where they lie; Arrow's own scalars are copies."""
    _, ends, data = values.buffers()
    bounds = np.frombuffer(ends, np.int64)[values.offset : values.offset + len(values) + 1]
    whole = memoryview(data or b"").cast("B")
    return [whole[begin:end] for begin, end in pairwise(bounds.tolist())]


def _source(items: Sequence[Any]) -> Dataset:
    import ray.data

    return ray.data.from_arrow([_row(item) for item in items])


def _stage(rows: Dataset, work: Callable[[Any], Iterable[Any]], *, num_cpus: float) -> Dataset:
    return rows.map_batches(
        _Stage(work), batch_size=None, batch_format="pyarrow", num_cpus=num_cpus
    )


def _results(rows: Dataset) -> Iterator[Any]:
    rows.context.enable_progress_bars = False
    rows.context.print_on_execution_start = False
    rows.context.target_max_block_size = 1  # every row stays a block, hence a task, of its own
    with _quiet():
        for table in rows.iter_batches(batch_size=None, batch_format="pyarrow"):
            for value in _values(table):
                if isinstance(value, _Failed):
                    raise UserError(*value.problems)
                yield value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Ray Data's own messages about every execution off the console."""
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
