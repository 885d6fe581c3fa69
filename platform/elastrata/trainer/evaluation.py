"""Evaluation during a run: its held-out data sets and their batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastrata.parallel.mesh import DataRank
from elastrata.step.evaluate import EvaluationConfig, evaluation_due, evaluation_step
from elastrata.step.records import StepRecord
from elastrata_pipelines.batches import Batches
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest, file_problems
from elastrata_pipelines.format.manifest import PREPARE_AGAIN_ADVICE
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.speeds import RankKinds
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """A held-out data set that exists."""

    key: str
    """The recipe key that names it."""
    storage: Storage
    manifest: Manifest


def find_evaluation_sets(config: EvaluationConfig) -> tuple[dict[str, EvaluationSet], list[str]]:
    """Return the data sets of `sets` that exist, by name, and a line for each problem."""
    sets, problems = dict[str, EvaluationSet](), list[str]()
    for number, one in enumerate(config.sets):
        key, storage = f"evaluation.sets.{number}.path", Storage(one.path)
        try:
            manifest = Manifest.read(storage)
            lines = [f"{line}; {PREPARE_AGAIN_ADVICE}" for line in file_problems(storage, manifest)]
            manifest.check_lengths(storage)
        except UserError as error:
            lines = list(error.problems)
        problems += [f"{key}: {line}" for line in lines]
        if not lines:
            sets[one.name] = EvaluationSet(key=key, storage=storage, manifest=manifest)
    return sets, problems


def set_problems(
    sets: Mapping[str, EvaluationSet],
    training: Sequence[Manifest],
    held_out: Sequence[Batches | None],
) -> Iterator[str]:
    """Yield a line for each mismatch between the evaluation sets and the training data."""
    if sets and None in held_out:
        yield (
            "evaluation.sets: needs held-out training data as well: "
            "prepare with data.prepare.held_out, or give evaluation.path"
        )
    for found in sets.values():
        yield from _mismatch_problems(found, training)


def _mismatch_problems(found: EvaluationSet, training: Sequence[Manifest]) -> Iterator[str]:
    for field, called in (
        ("tokenizer_fingerprint", "the tokenizer"),
        ("seq_len", "seq_len"),
        ("pairs", "pairs"),
    ):
        value = getattr(found.manifest, field)
        expected = dict.fromkeys(getattr(manifest, field) for manifest in training)
        # Without training data its own problems are reported already.
        if training and value not in expected:
            usual = " or ".join(map(str, expected))
            yield (
                f"{found.key}: {found.storage.url}: {called} {value}, expected {usual}, as in the "
                "training data"
            )


class HeldOutData:
    """This rank's part of the held-out data, for all phases that are left.

    Args:
        phases: the run's phases.
        held_out: the data of each phase, by name of the set; empty if there is none.
        config: interval and size of evaluations.
        data: this rank's place among the data ranks.
        done: steps that the run has done.
        has_parent: whether the run began with given weights; they are evaluated before its first
            step.
        kinds: kinds of the data ranks, by their memory; empty if all are of one kind.

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
        # Keyed by the last step of the phase. The phase of step `done` is kept: its end may still
        # have to be evaluated.
        self._parts = {
            phase.last_step: {
                name: evaluation_step(
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
        """Return the data to evaluate on after that step, by name of the set. An evaluation is
        always due at the end of a phase."""
        is_due = evaluation_due(
            self._config,
            step=record.step,
            steps=self._last_step(record.step),
            samples=record.samples,
            batch_samples=record.batch_samples,
        )
        return self.of(record.step) if is_due else {}

    def steps_due_at_start(self) -> Mapping[str, RankStep]:
        """Return the data to evaluate on before the run's first step; empty unless weights were
        given."""
        return self.of(0) if self._is_due_at_once else {}

    def of(self, step: int) -> Mapping[str, RankStep]:
        """Return the held-out data of the phase that contains a step."""
        return self._parts[self._last_step(step)]

    def _last_step(self, step: int) -> int:
        return min(last for last in self._parts if last >= step)
