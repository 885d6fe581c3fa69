"""Lean files: a checkpoint as raw bytes, for copies that nobody but the run reads.

DCP makes an archive of every tensor and a message about it: a price per tensor, in Python, that a
copy every few steps feels.
"""

from __future__ import annotations

import dataclasses
import io
from itertools import accumulate
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from elastrata.checkpoints.dcp_files import HashingStream
from elastrata.checkpoints.dcp_writer import CommitWriter, HashedResult

RAW = "elastrata.raw"
"""Marks a tensor that is stored as its bytes alone."""


@dataclasses.dataclass(frozen=True)
class LeanResult(HashedResult):
    """A rank's word to the coordinator about all that it wrote."""

    lengths: list[int]
    """Bytes of every item of its plan; they lie one after the other."""


class LeanWriter(CommitWriter):
    """Writes tensors as raw bytes, and files without a SHA-256."""

    _hashed = False

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._arrived()
        written: Future[list[WriteResult]] = Future()
        written.set_result([self._write(plan, planner)] if plan.items else [])
        return written

    def _write(self, plan: SavePlan, planner: SavePlanner) -> LeanResult:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        path, lengths = f"{self._folder}/{name}", []
        with self._files.create_stream(path, "wb") as stream:
            for item in plan.items:
                data = planner.resolve_data(item)
                raw = data.getbuffer() if isinstance(data, io.BytesIO) else raw_bytes(data)
                lengths.append(cast(HashingStream, stream).write(raw))
        place = _StorageInfo(name, 0, sum(lengths))
        first = plan.items[0].index
        return LeanResult(first, place.length, place, self._files.records[path], lengths)

    @override
    def _places(self, results: list[list[WriteResult]]) -> dict[MetadataIndex, _StorageInfo]:
        places = {}
        for plan, written in zip(self._planner.global_plan, results, strict=True):
            for result in cast("list[LeanResult]", written):
                starts = accumulate(result.lengths, initial=0)
                for item, start, length in zip(plan.items, starts, result.lengths, strict=False):
                    name = result.storage_data.relative_path
                    places[item.index] = _StorageInfo(name, start, length, (RAW,))
        return places


def raw_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor, in place where it is contiguous."""
    return cast("NDArray[np.uint8]", tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
