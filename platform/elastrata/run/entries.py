"""The entries of a history: JSON lines of known kinds, with checked types and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Discriminator, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from elastrata.step.records import StepRecord
from elastrata_pipelines.errors import UserError

_Count = Annotated[int, Field(ge=0, le=2**53)]
# Wider than 64 bits, because the FLOPs of a step can exceed 2**63.
_Number = Annotated[int, Field(ge=-(2**128), le=2**128)]
_Real = Annotated[float, Field(allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_Time = Annotated[float, Field(ge=0, lt=2**37, allow_inf_nan=False)]
_Metrics = dict[str, float]
_NOT_OF_STEPS = ("kind", "attempt", "time", "clock", "monotonic")
_NO_METRICS = (*_NOT_OF_STEPS, "step", "seconds")
_FOLDER = r"^[0-9]{9}-[0-9]{4,9}-[0-9a-f]{6}$"
# Unknown keys are allowed: later versions may add some. Strict, because a string instead of a
# number shows that the line was altered.
_STRICT_OPEN = ConfigDict(extra="allow", strict=True)


@with_config(_STRICT_OPEN)
class _Entry(TypedDict):
    attempt: _Count
    time: _Time
    clock: NotRequired[str]
    monotonic: NotRequired[_Seconds]


class _Started(_Entry):
    kind: Literal["started"]
    step: _Count
    world_size: _Count
    state: NotRequired[Literal["new", "hot", "durable"]]
    stayed: NotRequired[_Count]
    spare_bytes: NotRequired[_Count]
    seconds: NotRequired[dict[str, _Seconds]]


class _Step(_Entry):
    kind: Literal["step"]
    step: _Count
    samples: _Number
    tokens: _Number
    batch_samples: _Number
    world_size: _Count
    digest: str
    loss: float
    seconds: _Seconds
    seconds_waiting_for_data: NotRequired[_Seconds]
    flops: NotRequired[_Number]
    flops_of_zeros: NotRequired[_Number]
    skipped: NotRequired[bool | int]
    slowest_rank: NotRequired[_Count | None]
    time_imbalance: NotRequired[_Seconds | None]


class _Evaluated(_Entry):
    kind: Literal["evaluated"]
    step: _Count
    seconds: NotRequired[_Seconds]


class _RolledBack(_Entry):
    kind: Literal["rolled_back"]
    first: _Count
    last: _Count


class _Returned(_Entry):
    kind: Literal["returned"]
    step: _Count
    commit: Annotated[str, Field(pattern=_FOLDER)]


class _Committed(_Entry):
    kind: Literal["committed"]
    step: _Count
    commit: Annotated[str, Field(pattern=_FOLDER)]


class _Removed(_Entry):
    kind: Literal["removed"]
    commits: list[Annotated[str, Field(pattern=_FOLDER)]]


class _Forked(_Entry):
    kind: Literal["forked"]
    parent: str
    commit: str
    sha256: str
    step: _Count
    samples: _Number
    tokens: _Number
    head: NotRequired[dict[str, str | int] | None]


class _Halted(_Entry):
    kind: Literal["halted"]
    reason: str
    text: NotRequired[str]


class _Ended(_Entry):
    kind: Literal["ended"]
    status: str
    text: NotRequired[str]
    last: NotRequired[_Count]
    driver: NotRequired[str]


class _Substituted(_Entry):
    kind: Literal["substituted"]
    text: str


class _RanOut(_Entry):
    kind: Literal["ran_out"]
    group: str
    choice: dict[str, int | str | bool]
    text: str


class _Slowed(_Entry):
    kind: Literal["slowed"]
    step: _Count
    rank: _Count
    host: str
    device: str
    factor: _Seconds
    since: _Count
    is_over: bool


class _Fault(_Entry):
    kind: Literal["fault"]
    text: NotRequired[str]
    ranks: NotRequired[list[_Count]]
    newest: NotRequired[_Count]
    seconds_unheard: NotRequired[_Seconds]


class _Launched(_Entry):
    kind: Literal["launched"]
    mlflow_run_id: str | None


class _Suggested(_Entry):
    kind: Literal["suggested"]
    trial: str
    values: dict[str, Any]


class _Reported(_Entry):
    kind: Literal["reported"]
    trial: str
    step: _Count
    samples: _Count
    tokens: _Count
    seconds: _Seconds
    metrics: _Metrics


class _Copied(_Entry):
    kind: Literal["copied"]
    trial: str
    source: str
    step: _Count
    values: dict[str, Any]
    metrics: _Metrics


class _Concluded(_Entry):
    kind: Literal["concluded"]
    trial: str
    state: Literal["finished", "stopped", "diverged", "failed"]
    text: str


@with_config(_STRICT_OPEN)
class _Other(_Entry):
    kind: str


_KNOWN: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        _Started
        | _Step
        | _Evaluated
        | _RolledBack
        | _Returned
        | _Committed
        | _Removed
        | _Forked
        | _Halted
        | _Ended
        | _Substituted
        | _Fault
        | _RanOut
        | _Slowed
        | _Launched
        | _Suggested
        | _Reported
        | _Copied
        | _Concluded,
        Discriminator("kind"),
    ]
)
# Kinds that later versions add are read, but not checked.
_OTHER: TypeAdapter[Any] = TypeAdapter(_Other)
_RECORD = TypeAdapter(StepRecord)


def parse_entry(line: bytes, where: str) -> dict[str, Any]:
    """Parse one line of a history.

    Args:
        line: line of a part.
        where: file and line number, for messages.

    Raises:
        UserError: the line was altered: it is torn, not JSON, or has an impossible value.
    """
    try:
        entry: dict[str, Any] = _KNOWN.validate_json(line)
    except ValidationError as error:
        return _parse_unknown_kind(line, where, error)
    return entry


def step_record(entry: Mapping[str, Any], where: str) -> StepRecord:
    """Return the record of a step from its entry.

    Raises:
        UserError: a value is missing or has the wrong type.
    """
    # These keys are of the entry, not of the step.
    values = {key: value for key, value in entry.items() if key not in _NOT_OF_STEPS}
    try:
        record = _RECORD.validate_python(values)
        # Called for its errors: values in range can still be contradictory.
        record.to_metrics()
        return record
    except ValidationError as error:
        raise UserError(f"{where}: step {entry['step']}: {_reason(error)}") from None
    except (ArithmeticError, ValueError) as error:
        raise UserError(f"{where}: step {entry['step']}: {error} (altered)") from None


def metrics_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an evaluation entry, by name."""
    # All other numbers of an evaluation entry are metrics.
    return {k: v for k, v in entry.items() if k not in _NO_METRICS and _is_number(v)}


def _is_number(value: object) -> bool:
    """Return whether a value is a float or converts to one."""
    # Larger integers overflow when they are converted to a float.
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1023)


def _parse_unknown_kind(line: bytes, where: str, error: ValidationError) -> dict[str, Any]:
    """Parse an entry of a kind that this version does not know.

    Raises:
        UserError: the kind is known but the entry is invalid, or the line is not an entry.
    """
    if error.errors(include_url=False)[0]["type"] != "union_tag_invalid":
        raise UserError(f"{where}: {_reason(error)}") from None
    try:
        entry: dict[str, Any] = _OTHER.validate_json(line)
    except ValidationError as other:
        raise UserError(f"{where}: {_reason(other)}") from None
    return entry


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid":
        return "not JSON (truncated or altered)"
    if not place or place == ["kind"]:
        return "not an entry of a history (altered)"
    # The location of an error begins with the kind, as the tag of the union.
    kind, *keys = place if len(place) > 1 else ["entry", *place]
    return f"'{kind}' with a bad '{'.'.join(keys)}' (altered)"
