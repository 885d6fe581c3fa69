"""Evaluation on held-out data: equal batches, masks and sums every time, at any world size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator

from elastrata.config import NAME, Config
from elastrata.step.events import Evaluated
from elastrata.step.forward_backward import ForwardBackward
from elastrata.step.train_step import StepLoss, mean_loss, reduce_sums, total_weights
from elastrata.workload.workload import Workload
from elastrata_pipelines.batches import Batches
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.groups import Group
from elastrata_pipelines.payload import RankStep, decode
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.speeds import RankKinds

EVALUATION_SEED = 0
"""A constant, so that runs with different seeds are evaluated on the same predictions."""
OWN = ""
"""Name of the run's own held-out set: that of its data, or of `evaluation.path`."""


class NamedSet(Config):
    """A further held-out data set."""

    name: Annotated[str, Field(pattern=NAME)]
    """Name of the set; its loss is `eval/NAME/loss`."""
    path: Annotated[str, Field(min_length=1)]
    """Folder or URL of the data set."""


class EvaluationConfig(Config):
    """Intervals, data and size of evaluations."""

    either: ClassVar = (("every",), ("every_samples",))

    every: Annotated[int, Field(gt=0, le=10**9)] | None = 250
    """Steps between evaluations; the last step always has one."""
    every_samples: Annotated[int, Field(gt=0, le=10**15)] | None = None
    """Samples between evaluations, instead of `every`. An evaluation follows each step that reaches
    a multiple of this, over all samples of the run."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Folder or URL of the held-out data set. Default: `held_out` in `data.path`, as written by
    `prepare`; if missing, there is no evaluation."""
    samples: Annotated[int, Field(gt=0, le=10**12)] = 4096
    """Maximum samples of each set; always the same random choice."""
    sets: Annotated[tuple[NamedSet, ...], Field(max_length=256)] = ()
    """Additional held-out data sets, each evaluated separately. Need the tokenizer and `seq_len` of
    the training data."""

    @model_validator(mode="before")
    @classmethod
    def _samples_replace_steps(cls, value: Any) -> Any:
        # `every` has a default, which would otherwise conflict with `every_samples`.
        if isinstance(value, dict) and value.get("every_samples") is not None:
            return {"every": None, **value}
        return value

    @model_validator(mode="after")
    def _one_interval(self) -> EvaluationConfig:
        if (self.every is None) == (self.every_samples is None):
            raise ValueError("needs either every (steps) or every_samples, and null for the other")
        return self


def evaluation_due(
    config: EvaluationConfig, *, step: int, steps: int, samples: int, batch_samples: int
) -> bool:
    """Return whether the model is evaluated after a step.

    Args:
        config: the intervals.
        step: number of finished steps, this one included.
        steps: steps of the whole run; the last one is always followed by an evaluation.
        samples: samples seen since the run began, including those of this step.
        batch_samples: samples of this step.
    """
    if step == steps:
        return True
    if config.every_samples is None:
        return config.every is not None and step % config.every == 0
    # A batch seldom ends at a multiple: the first step that crosses one counts.
    return samples // config.every_samples > (samples - batch_samples) // config.every_samples


def evaluation_metrics(workload: Workload, sets: Iterable[NamedSet] = ()) -> list[str]:
    """Return the names of the metrics that an evaluation of this workload reports, over all
    sets."""
    names = ["loss", *workload.metrics()]
    places = ["eval", *(f"eval/{one.name}" for one in sets)]
    return [f"{place}/{name}" for place in places for name in names]


def evaluation_event(step: int, losses: Mapping[str, StepLoss], seconds: float) -> Evaluated:
    """Return the `Evaluated` event for the losses of all held-out sets."""
    metrics = _metrics_of(losses[OWN])
    for name, loss in losses.items():
        if name != OWN:
            set_metrics = {"loss": loss.total, **_metrics_of(loss)}
            metrics |= {f"{name}/{metric}": value for metric, value in set_metrics.items()}
    return Evaluated(step=step, loss=losses[OWN].total, metrics=metrics, seconds=seconds)


def _metrics_of(loss: StepLoss) -> dict[str, float]:
    return {**{f"{term}_loss": value for term, value in loss.terms.items()}, **loss.metrics}


def evaluation_step(
    batches: Batches, *, samples: int, rank: int, num_ranks: int, kinds: RankKinds = ()
) -> RankStep:
    """Return this rank's part of the held-out data. All ranks get the same number of micro-batches.

    Raises:
        UserError: a shard is missing or damaged.
    """
    group = Group(
        first_step=0,
        first_position=0,
        num_steps=1,
        batch_size=min(samples, batches.samples),
    )
    # Payloads come in the order of ranks, and only this rank's is decoded.
    for number, payload in enumerate(batches.payloads(group, num_ranks, kinds=kinds)):
        if number == rank:
            return next(decode(payload, batches.manifest.token_dtype))
    raise ValueError(f"rank {rank} of {num_ranks}")


def evaluate(
    forward_backward: ForwardBackward,
    workload: Workload,
    micro_batches: Sequence[Rows],
    vocabulary: Vocabulary,
    device: torch.device,
    *,
    is_primary: bool = True,
) -> StepLoss:
    """Return the mean loss and metrics over held-out data. Collective; training can continue
    after it."""
    batches = [
        workload.collate(rows, vocabulary, EVALUATION_SEED).to(device) for rows in micro_batches
    ]
    losses = forward_backward.evaluate(forward_backward.ready(batches))
    weights = total_weights(batches)
    whole = reduce_sums(weights, is_primary=is_primary)
    return mean_loss(losses, whole, is_primary=is_primary)
