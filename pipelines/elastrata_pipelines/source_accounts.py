"""Source accounts: what each source gave to a data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastrata_pipelines.format import Manifest, read_held_out
from elastrata_pipelines.preparation.provenance import Provenance
from elastrata_pipelines.preparation.skipped import total
from elastrata_pipelines.storage import Storage

_REASON_NOT_KEPT = "reason not kept"


@dataclass(frozen=True, kw_only=True)
class SourceAccount:
    """The share of one source."""

    name: str
    weight: float
    documents: int
    """For training, each counted once."""
    held_out: int
    """Documents held out."""
    skipped: dict[str, int]
    """Documents left out by reason, the commonest first."""
    samples: int
    tokens: int
    share: float
    """Share of the data set's tokens."""
    unknown_share: float | None
    """Share of the source's tokens; None where the tokenizer knows all text, or nobody has
    counted."""


def source_accounts(storage: Storage, manifest: Manifest) -> list[SourceAccount]:
    """The accounts of a data set's sources, then of those that are held out as a whole.

    Raises:
        UserError: what lies beside its manifest cannot be read.
    """
    training = {entry["name"]: entry for entry in map(_values, manifest.sources)}
    held_out: dict[str, dict[str, Any]] = {}
    if found := read_held_out(storage, manifest):
        held_out = {entry["name"]: entry for entry in map(_values, found.sources)}
    provenance = Provenance.read(storage)
    unknown = provenance.unknown_tokens if provenance else None
    return [
        _account(training.get(name), held_out.get(name), manifest.tokens, (unknown or {}).get(name))
        for name in {**training, **held_out}
    ]


def _values(entry: Any) -> dict[str, Any]:
    values = dict(entry)
    skipped = values["documents_skipped"]
    if isinstance(skipped, int):  # as earlier versions counted
        values["documents_skipped"] = {_REASON_NOT_KEPT: skipped} if skipped else {}
    return values


def _account(
    training: dict[str, Any] | None,
    held_out: dict[str, Any] | None,
    total_tokens: int,
    unknown: int | None,
) -> SourceAccount:
    entry = training or {**(held_out or {}), "documents": 0, "samples": 0, "tokens": 0}
    tokens = entry["tokens"]
    return SourceAccount(
        name=entry["name"],
        weight=entry["weight"],
        documents=entry["documents"],
        held_out=held_out["documents"] if held_out else 0,
        skipped=total([entry["documents_skipped"]]),
        samples=entry["samples"],
        tokens=tokens,
        share=tokens / total_tokens,
        unknown_share=None if unknown is None or not tokens else unknown / tokens,
    )
