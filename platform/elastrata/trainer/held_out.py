"""The held-out data of a run on one rank: which of it the model is evaluated on, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastrata.core.evaluate import EvaluationConfig, evaluation_due, held_out_step
from elastrata.core.mesh import DataRank
from elastrata.core.record import StepRecord
from elastrata_pipelines.batches import Batches
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.speeds import RankKinds


class HeldOut:
    """This rank's part of it, in every phase that is left.

    Args:
        phases: of the run.
        held_out: the data of each, by name of the set; empty where there is none.
        config: when to evaluate, and on how much.
        data: this rank's place among those that have samples.
        done: steps that the run has done.
        has_parent: whether the run began with weights: how good they are is measured before its
            first step.
        kinds: of the data ranks, by their memory; none: they are of one kind.

    Raises:
        UserError: a shard is missing or damaged.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        held_out: Sequence[Mapping[str, Batches]],
        config: EvaluationConfig,
        data: DataRank,
        done: int,
        *,
        has_parent: bool = False,
        kinds: RankKinds = (),
    ) -> None:
        self._config = config
        self._is_due_at_once = has_parent and done == 0
        self._parts = {
            phase.last_step: {
                name: held_out_step(
                    batches,
                    samples=config.samples,
                    rank=data.rank,
                    num_ranks=data.dp_size,
                    kinds=kinds,
                )
                for name, batches in sets.items()
            }
            for phase, sets in zip(phases, held_out, strict=True)
            if phase.last_step >= done
        }

    def due(self, record: StepRecord) -> Mapping[str, RankStep]:
        """The data that the model is evaluated on after that step, by name of the set; there is
        always an evaluation at the end of a phase."""
        is_due = evaluation_due(
            self._config,
            step=record.step,
            steps=self._last_step(record.step),
            samples=record.samples,
            batch_samples=record.batch_samples,
        )
        return self.of(record.step) if is_due else {}

    def due_at_once(self) -> Mapping[str, RankStep]:
        """The data that the model is evaluated on before the first step that is left."""
        return self.of(0) if self._is_due_at_once else {}

    def of(self, step: int) -> Mapping[str, RankStep]:
        """That of the phase which has that step."""
        return self._parts[self._last_step(step)]

    def _last_step(self, step: int) -> int:
        return min(last for last in self._parts if last >= step)
