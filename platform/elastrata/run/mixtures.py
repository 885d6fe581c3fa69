"""The mixtures of a run, as its folder keeps them: what is audited does not depend on how weights
become shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from elastrata_pipelines.checked_json import Record
from elastrata_pipelines.mixture import UNITS, Leg, Mixture

Share = Annotated[int, Field(ge=0, le=UNITS)]
Positions = Annotated[int, Field(ge=0, lt=2**62)]


class LegRecord(Record):
    """As `Leg` has it."""

    shares: Annotated[tuple[Share, ...], Field(min_length=1)]
    final_shares: tuple[Share, ...] | None = None
    length: Annotated[int, Field(ge=1, lt=2**62)]
    stop: Positions | None = None


Mixtures = tuple[tuple[LegRecord, ...], ...]
"""The legs of each phase's mixture; none of a phase that has one data set."""


def record_of(mixtures: Sequence[Mixture | None]) -> Mixtures | None:
    """The record of the phases' mixtures; None where there is none."""
    if not any(mixtures):
        return None
    return tuple(
        tuple(LegRecord.model_validate(vars(leg)) for leg in mixture.legs) if mixture else ()
        for mixture in mixtures
    )


def mixtures_of(record: Mixtures | None, num_phases: int) -> tuple[Mixture | None, ...]:
    """The mixture of each phase.

    Raises:
        ValueError: there are not so many phases, or shares that do not add up.
    """
    if record is None:
        return (None,) * num_phases
    if len(record) != num_phases:
        raise ValueError(f"{len(record)} mixtures, expected {num_phases}")
    return tuple(
        Mixture(tuple(Leg(**leg.model_dump()) for leg in legs)) if legs else None for legs in record
    )
