"""The plan of a save, made once for all saves of a state."""

from __future__ import annotations

import dataclasses
import pickle
import uuid
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor
from typing_extensions import override


class RememberingPlanner(DefaultSavePlanner):
    """Plans the save of a state once; later ones of the same names and shapes follow that plan.

    Planning is Python for every tensor, on every rank and again on rank 0, at the expense of the
    training that runs meanwhile.
    """

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        # DCP remembers for the whole process, by this key.
        self._cached_plans_key = uuid.uuid4().hex
        self._layout: list[tuple[Any, ...]] | None = None
        self._pickled: tuple[Metadata, Metadata, bytes] | None = None

    @override
    def create_local_plan(self) -> SavePlan:
        layout = [_layout(name, value) for name, value in self.state_dict.items()]
        known = SavePlanner._cached_save_plan.get(self._cached_plans_key)
        if known is not None and layout == self._layout:
            self.plan = known
            return SavePlan([], usable=False)
        self._layout = layout
        return super().create_local_plan()

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, _ = super().create_global_plan(all_plans)
        # DCP sends the metadata to all ranks after the save; rank 0 alone needs it: `metadata`.
        return plans, Metadata({})

    def pickled_metadata(self, places: dict[MetadataIndex, _StorageInfo]) -> bytes:
        """What the planned save holds, and where; on rank 0, after the global plan."""
        if self._pickled:
            planned, whole, data = self._pickled
            if planned is self.metadata and whole.storage_data == places:
                return data
        whole = dataclasses.replace(self.metadata, version=CURRENT_DCP_VERSION, storage_data=places)
        self._pickled = self.metadata, whole, pickle.dumps(whole)
        return self._pickled[2]

    def forget(self) -> None:
        """Frees what DCP remembers for this planner."""
        for remembered in (
            SavePlanner._cached_save_plan,
            SavePlanner._cached_final_save_plan,
            SavePlanner._cached_all_plans,
            SavePlanner._cached_global_plan,
            SavePlanner._cached_metadata,
        ):
            remembered.pop(self._cached_plans_key, None)


def _layout(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, DTensor):
        return name, value.shape, value.dtype, value.to_local().shape, value.placements
    return (name, value.shape, value.dtype) if isinstance(value, torch.Tensor) else (name,)
