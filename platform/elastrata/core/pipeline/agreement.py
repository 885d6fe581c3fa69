"""What the stages of a pipeline agree on before a schedule's first micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.pipelining import PipelineStage


class Agreement:
    """That all stages know the shapes they will receive, asked once for all schedules.

    torch asks for every new one, that is for every new length of micro-batches, stage after stage,
    and has the host wait twice for the device: to ask, and to read the answer. The first time is
    not spared: it also connects neighbouring ranks.
    """

    def __init__(self) -> None:
        self._mode: Any = None

    def spares(self, schedule: Any) -> None:
        """Has a new schedule take over what an earlier one has agreed on."""
        if self._mode is not None:
            schedule._warmup_p2p = self._taken_over

    def holds(self, stages: Sequence[PipelineStage]) -> None:
        """These stages have agreed; in versions of torch that ask for nothing, on nothing."""
        self._mode = getattr(stages[0], "_inference_mode", None)

    def _taken_over(self, stages: Sequence[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = self._mode
