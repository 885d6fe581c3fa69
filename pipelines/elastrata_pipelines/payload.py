"""Payloads: one rank's rows of consecutive steps as an Arrow IPC stream, read without copying."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastrata_pipelines.deal import cut_into_parts
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format.shard import values_of
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.speeds import Speeds

_STEPS, _SPEEDS, _PLACE = b"steps", b"speeds", b"place"
_SOURCE = "source"
Counts = tuple[Mapping[int, int], ...]
"""Micro-batches of every rank by token budget, for each kind of rank, if all ranks were of that
kind."""


class WrongStepError(UserError):
    """A rank received rows of another rank, or of a step that is not the next one."""


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """Layout of the next rows of a payload as one step."""

    step: int
    """Number of the step, counted from 1."""
    cuts: list[int]
    """Micro-batch m of the step is rows cuts[m]:cuts[m + 1]."""
    imbalance: float
    """Largest work of a rank over the mean, in this step."""
    rounds: int = 1
    """Number of virtual ranks that the rank plays in turn, with equally many micro-batches each."""
    counts: Counts = ()
    """Micro-batch counts, if micro-batches may have one of several token budgets."""
    sources: tuple[str, ...] = ()
    """Names of a mixture's sources, by number."""
    work: int = 0
    """Work of the rank's rows, by the work model."""


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One rank's part of one step."""

    step: int
    rows: Rows
    cuts: npt.NDArray[np.int64]
    imbalance: float
    rounds: int = 1
    counts: Counts = ()
    """Micro-batch counts, if micro-batches may have one of several token budgets."""
    work: int = 0
    """Work of the rank's rows, by the work model."""
    speeds: Speeds = ()
    """Speeds of all data ranks by which the step was dealt; empty if they are equally fast."""
    rank: int = 0
    """Data rank to which the step was dealt."""
    num_ranks: int = 1
    """Number of data ranks."""

    def cut_for(self, budgets: Sequence[int], kind: int = 0) -> Self:
        """Return the step with its rows divided into micro-batches of up to the given budgets.

        Rows keep their order, and every rank gets the same number of micro-batches. With a single
        budget the step is returned unchanged.

        Args:
            budgets: token budget of each kind of rank.
            kind: kind of this rank.
        """
        if not self.counts:
            return self
        # All ranks have the same counts, so they agree on a number without communication.
        needed = (
            kind_counts[budget] for kind_counts, budget in zip(self.counts, budgets, strict=True)
        )
        return replace(self, cuts=cut_into_parts(self.rows.lengths, max(needed), budgets[kind]))

    @property
    def micro_batches(self) -> list[Rows]:
        """Rows that pass through the model together, each a view."""
        return self.rows.split(self.cuts)


def encode(
    table: pa.Table,
    epochs: npt.NDArray[np.int64],
    steps: Sequence[StepLayout],
    speeds: Speeds = (),
    sources: npt.NDArray[np.int32] | None = None,
    *,
    rank: int = 0,
    num_ranks: int = 1,
) -> pa.Buffer:
    """Encode rows, in order, and the layout of their steps.

    Args:
        table: rows with the columns of a shard.
        epochs: epoch in which each row is read, shape [rows].
        steps: layouts whose last cuts add up to the number of rows.
        speeds: speeds of all data ranks by which the steps were dealt.
        sources: for a mixture, the number of each row's source, shape [rows].
        rank: data rank to which the rows belong.
        num_ranks: number of data ranks.
    """
    table = table.append_column("epoch", pa.array(epochs))
    if sources is not None:
        table = table.append_column(_SOURCE, pa.array(sources))
    # One chunk per column, so that the reader gets one batch and its arrays are views.
    table = table.combine_chunks()
    layout = json.dumps([vars(step) for step in steps]).encode()
    place = json.dumps([rank, num_ranks]).encode()
    table = table.replace_schema_metadata(
        {_STEPS: layout, _SPEEDS: json.dumps(speeds).encode(), _PLACE: place}
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def decode(payload: pa.Buffer, token_dtype: str) -> Iterator[RankStep]:
    """Yield the steps of a payload, in order; all arrays are views of the payload's memory."""
    with pa.ipc.open_stream(payload) as reader:
        layouts = json.loads(reader.schema.metadata[_STEPS])
        speeds = tuple(json.loads(reader.schema.metadata[_SPEEDS]))
        rank, num_ranks = json.loads(reader.schema.metadata[_PLACE])
        batches = [batch for batch in reader if batch.num_rows]
        schema = reader.schema
    # A rank gets no rows if a batch has fewer rows than ranks.
    rows = _rows(batches[0] if batches else pa.RecordBatch.from_pylist([], schema), token_dtype)
    counts = np.cumsum([0] + [layout["cuts"][-1] for layout in layouts])
    for layout, part in zip(layouts, rows.split(counts), strict=True):
        yield RankStep(
            step=layout["step"],
            rows=replace(part, source_names=tuple(layout["sources"])),
            cuts=np.array(layout["cuts"], dtype=np.int64),
            imbalance=layout["imbalance"],
            rounds=layout["rounds"],
            counts=tuple(
                # JSON has only strings as keys of objects.
                {int(budget): count for budget, count in kind_counts.items()}
                for kind_counts in layout["counts"]
            ),
            work=layout["work"],
            speeds=speeds,
            rank=rank,
            num_ranks=num_ranks,
        )


def check_order(
    steps: Iterable[RankStep], rank: int, num_ranks: int, *, done: int, last: int
) -> Iterator[RankStep]:
    """Yield a rank's steps, and check that each one is this rank's and the next one.

    Args:
        steps: the steps, as they arrive.
        rank: this data rank.
        num_ranks: number of data ranks.
        done: number of completed steps of the run.
        last: the run's last step.

    Raises:
        WrongStepError: steps belong to another rank or another number of ranks, are out of order,
            or end too soon.
    """
    # The order of Ray Data's blocks is not documented, so it is checked.
    tail = "Ray Data hands out blocks in another order than this Elastrata relies on"
    for step in steps:
        if (step.rank, step.num_ranks) != (rank, num_ranks):
            raise WrongStepError(
                f"step {step.step}: rank {rank} of {num_ranks} got what was dealt to rank "
                f"{step.rank} of {step.num_ranks}: {tail}"
            )
        if step.step != done + 1:
            raise WrongStepError(
                f"step {step.step}: rank {rank} of {num_ranks} got it after step {done}, expected "
                f"step {done + 1}: {tail}"
            )
        done = step.step
        yield step
    if done < last:
        raise WrongStepError(
            f"step {done + 1}: rank {rank} of {num_ranks} got nothing after step {done} of {last}: "
            f"{tail}"
        )


def _rows(batch: pa.RecordBatch, token_dtype: str) -> Rows:
    columns = set(batch.schema.names)
    return Rows(
        sample_ids=batch["sample_id"].to_numpy(),
        epochs=batch["epoch"].to_numpy(),
        lengths=batch["length"].to_numpy().astype(np.int64),
        tokens=values_of(batch["tokens"], token_dtype),
        boundaries=_boundaries(batch["boundaries"]) if "boundaries" in columns else None,
        sources=batch[_SOURCE].to_numpy() if _SOURCE in columns else None,
        second_starts=(
            batch["second_start"].to_numpy().astype(np.int64) if "second_start" in columns else None
        ),
        is_next=(batch["is_next"].to_numpy(zero_copy_only=False) if "is_next" in columns else None),
    )


def _boundaries(column: pa.Array) -> tuple[npt.NDArray[np.int32], ...]:
    return tuple(np.frombuffer(value.as_buffer(), np.int32) for value in column)
