"""Opening a data set of two billion samples, as a run does: seconds and memory.

    python benchmarks/large_data.py [--shards N] [--beside CHECKOUT]

Writes a manifest of N shards, each of 40 stripes of 512 samples, without the shards themselves.
Then uses it as a run's driver and readers do, each time in a new process:

- reads the manifest;
- seeks a position of the order, in an epoch that was not used before, and then another one there;
- looks up the stripes of a batch among the shards, up to the first missing shard;
- counts the groups of a run of a million steps.

With --beside the version in that folder, such as one that `git worktree add` creates, alternates
with this one. Writes results/large_data.json.
"""

from __future__ import annotations

import json
import pickle
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from harness import of_version, parser_of, scratch_folder, write_result

STRIPES, STRIPE_SIZE, SEQ_LEN = 40, 512, 128
WINDOW, BATCH, STEPS = 64, 16_384, 1_000_000
Value = TypeVar("Value")


def write_manifest(folder: Path, shards: int) -> None:
    """Write a manifest as `elastrata prepare` does."""
    from elastrata_pipelines.format import FileEntry, Manifest, SourceEntry, Vocabulary
    from elastrata_pipelines.storage import Storage

    samples = shards * STRIPES * STRIPE_SIZE
    histogram = [0] * SEQ_LEN + [samples]
    entries = [
        FileEntry(
            path=f"shards/{number:06d}.parquet",
            bytes=10_000_000,
            sha256=f"{number:064x}",
            samples=STRIPES * STRIPE_SIZE,
            stripes=STRIPES,
        )
        for number in range(shards)
    ]
    index_entries = [FileEntry(path="lengths.npy", bytes=4 * samples, sha256="0" * 64)]
    source = SourceEntry(
        name="text",
        weight=1.0,
        documents=samples,
        documents_skipped={},
        bytes_read=samples,
        samples=samples,
        tokens=samples * SEQ_LEN,
    )
    Manifest(
        samples=samples,
        tokens=samples * SEQ_LEN,
        stripes=shards * STRIPES,
        stripe_size=STRIPE_SIZE,
        seq_len=SEQ_LEN,
        seed=0,
        packing="none",
        pairs=False,
        token_dtype="uint16",
        length_histogram=tuple(histogram),
        vocabulary=Vocabulary(
            size=50_304, pad_id=0, mask_id=None, special_ids=(), continuation_ids=()
        ),
        tokenizer_fingerprint="",
        sources=(source,),
        files=(*entries, *index_entries),
    ).write(Storage(str(folder)))


def timed(call: Callable[[], Value]) -> tuple[float, Value]:
    """Return the seconds of a call, and its result."""
    start_time = time.perf_counter()
    value = call()
    return time.perf_counter() - start_time, value


def looked_at(folder: str) -> dict[str, float]:
    """Return the figures of the version of Elastrata that this process imports."""
    import numpy as np

    from elastrata_pipelines.batches import Batches, Start
    from elastrata_pipelines.deal import WorkModel
    from elastrata_pipelines.errors import UserError
    from elastrata_pipelines.format import Manifest, read_stripes
    from elastrata_pipelines.order import Order
    from elastrata_pipelines.phase import Phase
    from elastrata_pipelines.storage import Storage

    storage, figures = Storage(folder), dict[str, float]()
    figures["open_s"], manifest = timed(lambda: Manifest.read(storage))
    figures["fingerprint_s"], _ = timed(lambda: manifest.fingerprint)
    order = Order(
        num_samples=manifest.samples,
        stripe_size=manifest.stripe_size,
        window_stripes=WINDOW,
        seed=0,
    )
    figures["peak_mb_open"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    middle = manifest.samples // 2
    # The order of an epoch is computed at its first use.
    figures["first_seek_s"], places = timed(lambda: order.places(middle, BATCH))
    figures["next_seek_s"], _ = timed(lambda: order.places(middle // 2, BATCH))

    def look_up() -> None:
        try:
            read_stripes(storage, manifest, np.unique(places.stripes).tolist())
        except UserError:
            return
        raise AssertionError("there is no shard")

    figures["look_up_s"], _ = timed(look_up)
    figures["look_up_again_s"], _ = timed(look_up)
    batches = Batches(
        url=folder,
        manifest=manifest,
        order=order,
        work=WorkModel(linear=1, quadratic=0),
        tokens_per_micro_batch=2**14,
    )
    long_phase = Phase(batches=batches, steps=STEPS, batch_size=BATCH)
    most = BATCH * SEQ_LEN  # one batch; MAX_GROUP_TOKENS may be less
    figures["groups_s"], _ = timed(lambda: len(long_phase.groups(Start(), max_tokens=most)))
    # Readers in other processes get this object.
    figures["pickle_mb"] = len(pickle.dumps(batches)) / 1e6
    figures["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return figures


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--beside", type=Path, help="the checkout of another version")
    parser.add_argument("--only", help="print the figures of the data set in this folder")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(looked_at(arguments.only)))
        return
    versions: dict[str, Path | None] = {"this": None}
    if arguments.beside:
        versions["other"] = arguments.beside.resolve()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    with scratch_folder() as folder:
        write_manifest(folder, arguments.shards)
        size = (folder / "manifest.json").stat().st_size
        for _ in range(arguments.rounds):
            for name, checkout in versions.items():
                rounds[name].append(of_version(checkout, "--only", str(folder)))
    medians = {
        name: {
            key: round(statistics.median(one[key] for one in version_rounds), 5)
            for key in version_rounds[0]
        }
        for name, version_rounds in rounds.items()
    }
    figures = {
        "shards": arguments.shards,
        "stripes": arguments.shards * STRIPES,
        "samples": arguments.shards * STRIPES * STRIPE_SIZE,
        "manifest_mb": round(size / 1e6, 1),
        **medians,
    }
    write_result("large_data", figures, ("pydantic", "numpy"))


if __name__ == "__main__":
    main()
