"""The pipeline: runs tasks in many processes with Ray Data. No other module of the preparation
uses Ray."""

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

# Reading waits for disks, so two readers share a CPU. Not more, since starting a process takes as
# long as reading 10,000 small files. Any value but 1 keeps Ray from fusing reading and work.
_READER_CPUS = 0.5


def run_in_parallel(items: Sequence[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
    """Yield `work(item)` for each item, in any order, using all CPUs of the cluster.

    Raises:
        UserError: an error of `work`, or files that it cannot read or write.
    """
    return _iterate_results(_add_stage(_make_data_set(items), _OneResult(work), num_cpus=1))


def split_in_parallel(
    items: Sequence[Item], split: Callable[[Item], Iterable[Part]], work: Callable[[Part], Result]
) -> Iterator[Result]:
    """Yield `work(part)` for each part of each item, in any order, using all CPUs of the cluster.

    Only a few parts exist at a time.

    Raises:
        UserError: an error of `split` or `work`, or files that they cannot read or write.
    """
    parts = _add_stage(_make_data_set(items), split, num_cpus=_READER_CPUS)
    return _iterate_results(_add_stage(parts, _OneResult(work), num_cpus=1))


@dataclass(frozen=True)
class _OneResult:
    work: Callable[[Any], Any]

    def __call__(self, item: Any) -> tuple[Any]:
        return (self.work(item),)


@dataclass(frozen=True)
class _Failure:
    """A user error on its way to the driver."""

    # Passed as a value, because Ray would add a traceback to an exception.
    problems: tuple[str, ...]


@dataclass(frozen=True)
class _Stage:
    """Function of a task: maps rows of pickled values to rows of pickled values."""

    work: Callable[[Any], Iterable[Any]]

    def __call__(self, table: pa.Table) -> Iterator[pa.Table]:
        for value in _values(table):
            if isinstance(value, _Failure):
                yield _row(value)
                continue
            try:
                for result in self.work(value):
                    yield _row(result)
            except UserError as error:
                yield _row(_Failure(error.problems))
            # A full disk, or an unavailable store.
            except OSError as error:
                yield _row(_Failure((f"{type(error).__name__}: {error}",)))


def _row(value: Any) -> pa.Table:
    large: list[pickle.PickleBuffer] = []
    # Large buffers are stored separately, so that they are not copied.
    data = pickle.dumps(value, protocol=5, buffer_callback=large.append)
    found = [buffer.raw() for buffer in large]
    buffers = pa.LargeListArray.from_arrays(
        pa.array([0, len(found)], pa.int64()), _binary_array(found)
    )
    return pa.table({"value": _binary_array([data]), "buffers": buffers})


def _binary_array(values: Sequence[bytes | memoryview]) -> pa.LargeBinaryArray:
    """Return an array of values; a single value is not copied."""
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
    """Return the bytes of all values as views."""
    # Arrow's own scalars would be copies.
    _, ends, data = values.buffers()
    bounds = np.frombuffer(ends, np.int64)[values.offset : values.offset + len(values) + 1]
    whole = memoryview(data or b"").cast("B")
    return [whole[begin:end] for begin, end in pairwise(bounds.tolist())]


def _make_data_set(items: Sequence[Any]) -> Dataset:
    import ray.data

    return ray.data.from_arrow([_row(item) for item in items])


def _add_stage(rows: Dataset, work: Callable[[Any], Iterable[Any]], *, num_cpus: float) -> Dataset:
    return rows.map_batches(
        _Stage(work), batch_size=None, batch_format="pyarrow", num_cpus=num_cpus
    )


def _iterate_results(rows: Dataset) -> Iterator[Any]:
    rows.context.enable_progress_bars = False
    rows.context.print_on_execution_start = False
    # Every row stays a separate block, and hence a separate task.
    rows.context.target_max_block_size = 1
    with _quiet_ray_data():
        for table in rows.iter_batches(batch_size=None, batch_format="pyarrow"):
            for value in _values(table):
                if isinstance(value, _Failure):
                    raise UserError(*value.problems)
                yield value


@contextlib.contextmanager
def _quiet_ray_data() -> Iterator[None]:
    """Keep Ray Data's messages about every execution off the console."""
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
