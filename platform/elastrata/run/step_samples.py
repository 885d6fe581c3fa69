"""The samples of a step: where each is stored, told by the order, proven by the step's digest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastrata.run import history
from elastrata.run.folder import RUN_FILE, read_identity, read_summary
from elastrata.run.fork import Taken, taken_by
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.hashing import digest
from elastrata_pipelines.order import Order
from elastrata_pipelines.preparation.origins import Origin, find_origins, source_names
from elastrata_pipelines.rows import mixed_ids
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stripes import Stripes

ANY = ""
"""In the place of a source's name: of all."""


@dataclass(frozen=True, kw_only=True)
class StepSample:
    """A sample that a step has seen."""

    data_set: str
    """Folder or URL."""
    id: str
    """16 hex digits."""
    epoch: int
    """Of its data set, counted from 0."""
    tokens: int
    shard: str
    row: int
    """In the shard."""
    origin: Origin | None = None
    """The document that it begins with; None where the text is not at hand."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def step_samples(
    run: Storage, step: int, text: Mapping[str, Sequence[str]] | None = None
) -> list[StepSample]:
    """The samples of a step of a run, in the order of its sources.

    Args:
        run: its folder.
        step: as its history counts them.
        text: where the text of each source of a preparation lies, by its name or `ANY`, to find
            documents in.

    Raises:
        UserError: there is no such step, its data set is not what it was, or the samples are not
            those that the step has seen.
    """
    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{run.uri()}: no run here ({RUN_FILE} is missing)")
    steps = history.effective_steps(history.read(run.sub("history")))
    entry = next((one for one in steps if one["step"] == step), None)
    if entry is None:
        origin = identity.origin
        where = f"; steps up to {origin.step} are those of {origin.url}" if origin else ""
        last = f"1 to {steps[-1]['step']:,}" if steps else "none"
        raise UserError(f"--step: {step}: not on record in {run.uri()}: expected {last}{where}")
    (taken,) = taken_by([entry], read_summary(run).phases, identity, run.uri(RUN_FILE))
    found, total = list[StepSample](), 0
    for part in taken:
        samples, part_of_digest = _of_data_set(part, text or {})
        found += samples
        total += part_of_digest
    if f"{total % 2**64:016x}" != entry["digest"]:
        raise UserError(
            f"{run.uri('history')}: step {step}: digest {entry['digest']}, but the data gives "
            f"{total % 2**64:016x}: these are not the samples that it has seen"
        )
    return found


def _of_data_set(taken: Taken, text: Mapping[str, Sequence[str]]) -> tuple[list[StepSample], int]:
    """The samples of one data set in a step, and their part of its digest."""
    storage = Storage(taken.data_set.url)
    manifest = Manifest.read(storage)
    if manifest.fingerprint != taken.data_set.fingerprint:
        raise UserError(
            f"{storage.uri()}: not the data set any more that the run was trained on; prepared "
            "again from the same text in the same way, it is"
        )
    order = Order(
        num_samples=manifest.samples,
        stripe_size=manifest.stripe_size,
        window_stripes=taken.phase.window_stripes,
        seed=taken.phase.seed,
    )
    places = order.places(*taken.span)
    table, index = Stripes(storage, manifest).rows(places)
    ids = table["sample_id"].to_numpy()[index]
    lengths = table["length"].to_numpy()[index]
    names = source_names(storage)
    asked = {name: paths for name in names if (paths := text.get(name) or text.get(ANY))}
    origins = find_origins(storage, manifest, ids.tolist(), asked) if asked else {}
    samples = [
        StepSample(
            data_set=storage.uri(),
            id=f"{one:016x}",
            epoch=epoch,
            tokens=length,
            shard=shard,
            row=row,
            origin=origins.get(one),
        )
        for one, epoch, length, (shard, row) in zip(
            ids.tolist(),
            places.epochs.tolist(),
            lengths.tolist(),
            _stored(manifest, places.stripes.tolist(), places.rows.tolist()),
            strict=True,
        )
    ]
    identities = ids if taken.source is None else mixed_ids(taken.source, ids)
    return samples, digest(identities)


def _stored(
    manifest: Manifest, stripes: Sequence[int], rows: Sequence[int]
) -> list[tuple[str, int]]:
    """Shard and row in it of rows of stripes."""
    starts = manifest.first_stripes
    numbers = [bisect_right(starts, stripe) - 1 for stripe in stripes]
    return [
        (manifest.shards[number].path, (stripe - starts[number]) * manifest.stripe_size + row)
        for number, stripe, row in zip(numbers, stripes, rows, strict=True)
    ]
