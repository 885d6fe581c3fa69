"""The samples of a step: located by the order of samples, and verified by the step's digest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastrata.run import history
from elastrata.run.folder import RUN_FILE, read_identity, read_summary
from elastrata.run.fork import TakenSamples, samples_by_step
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.hashing import digest
from elastrata_pipelines.order import Order
from elastrata_pipelines.preparation.origins import Origin, find_origins, source_names
from elastrata_pipelines.rows import mixture_ids
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stripes import Stripes

ANY = ""
"""Key for the text of all sources, in place of a source's name."""


@dataclass(frozen=True, kw_only=True)
class StepSample:
    """A sample that a step has seen."""

    data_set: str
    """Folder or URL."""
    id: str
    """16 hex digits."""
    epoch: int
    """Epoch of its data set, counted from 0."""
    tokens: int
    shard: str
    row: int
    """Row within the shard."""
    origin: Origin | None = None
    """The document with which it begins; None if the text is not available."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def step_samples(
    run: Storage, step: int, text: Mapping[str, Sequence[str]] | None = None
) -> list[StepSample]:
    """Return the samples of a step of a run, in the order of its sources.

    Args:
        run: the run's folder.
        step: number of the step in the run's history.
        text: paths of the text of each source, by its name or `ANY`, in which to find documents.

    Raises:
        UserError: there is no such step, its data set has changed, or the samples do not match the
            step's digest.
    """
    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{run.uri()}: no run here ({RUN_FILE} is missing)")
    steps = history.effective_steps(history.read_entries(run.sub("history")))
    entry = next((one for one in steps if one["step"] == step), None)
    if entry is None:
        origin = identity.origin
        where = f"; steps up to {origin.step} are those of {origin.url}" if origin else ""
        last = f"1 to {steps[-1]['step']:,}" if steps else "none"
        raise UserError(f"--step: {step}: not recorded in {run.uri()}: expected {last}{where}")
    # Computed for the one step alone, from its position.
    (taken,) = samples_by_step([entry], read_summary(run).phases, identity, run.uri(RUN_FILE))
    found, total = list[StepSample](), 0
    for part in taken:
        samples, part_of_digest = _samples_of_data_set(part, text or {})
        found += samples
        total += part_of_digest
    # The digest proves that these are the samples which were trained on.
    if f"{total % 2**64:016x}" != entry["digest"]:
        raise UserError(
            f"{run.uri('history')}: step {step}: digest {entry['digest']}, but the data gives "
            f"{total % 2**64:016x}: these are not the samples of that step"
        )
    return found


def _samples_of_data_set(
    part: TakenSamples, text: Mapping[str, Sequence[str]]
) -> tuple[list[StepSample], int]:
    """Return a step's samples of one data set, and their part of the step's digest."""
    storage = Storage(part.data_set.url)
    manifest = Manifest.read(storage)
    if manifest.fingerprint != part.data_set.fingerprint:
        raise UserError(
            f"{storage.uri()}: no longer the data set that the run was trained on; prepare "
            "it again from the same text and configuration"
        )
    order = Order(
        num_samples=manifest.samples,
        stripe_size=manifest.stripe_size,
        window_stripes=part.phase.window_stripes,
        seed=part.phase.seed,
    )
    places = order.places(*part.span)
    table, index = Stripes(storage, manifest).rows(places)
    ids = table["sample_id"].to_numpy()[index]
    lengths = table["length"].to_numpy()[index]
    names = source_names(storage)
    # A source's own text has precedence over that of all sources.
    requested_text = {name: paths for name in names if (paths := text.get(name) or text.get(ANY))}
    origins = (
        find_origins(storage, manifest, ids.tolist(), requested_text) if requested_text else {}
    )
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
            _locate_rows(manifest, places.stripes.tolist(), places.rows.tolist()),
            strict=True,
        )
    ]
    # The digest of a mixture distinguishes equal ids of different sources.
    identities = ids if part.source is None else mixture_ids(part.source, ids)
    return samples, digest(identities)


def _locate_rows(
    manifest: Manifest, stripes: Sequence[int], rows: Sequence[int]
) -> list[tuple[str, int]]:
    """Return the shard and the row within it for each row of a stripe."""
    starts = manifest.first_stripes
    # Stripes are numbered across all shards, in order.
    numbers = [bisect_right(starts, stripe) - 1 for stripe in stripes]
    return [
        (manifest.shards[number].path, (stripe - starts[number]) * manifest.stripe_size + row)
        for number, stripe, row in zip(numbers, stripes, rows, strict=True)
    ]
