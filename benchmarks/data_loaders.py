"""Loaders of one corpus, and one process of benchmarks/data_loading.py.

    python benchmarks/data_loaders.py write|check|measure LOADER VARIANT CORPUS FOLDER

The process writes, checks or measures one loader and prints one JSON object as its last line.
"""

from __future__ import annotations

# Only a loader's function imports its library, as few environments have all of them.
import json
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, count, groupby, islice, pairwise, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

Batch = tuple[np.ndarray, np.ndarray]
"""The concatenated tokens of the batch's samples, without padding, and the samples' lengths."""
BATCH_SIZE = 32
WORKERS = 2
SHUFFLE_BUFFER = 8192
"""Samples in a loader's shuffle buffer, if it has one: as many as in a window of Elastrata's."""

Sample = TypeVar("Sample")


class Samples:
    """The samples of a corpus by index, without copies."""

    def __init__(self, folder: Path) -> None:
        self.offsets = np.load(folder / "offsets.npy")
        # A plain array over the map: slicing np.memmap itself is several times slower.
        self.tokens = np.asarray(np.memmap(folder / "tokens.bin", np.uint16, mode="r"))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]


def collate(samples: Sequence[np.ndarray]) -> Batch:
    """Return a batch of samples."""
    return np.concatenate(samples), np.fromiter(map(len, samples), np.int64, len(samples))


def collate_bytes(samples: Sequence[bytes]) -> Batch:
    """Return a batch of samples that are stored as raw bytes."""
    # uint16: two bytes per token.
    lengths = np.fromiter(map(len, samples), np.int64, len(samples)) // 2
    return np.frombuffer(b"".join(samples), np.uint16), lengths


def batched(
    samples: Iterable[Sample], collated: Callable[[Sequence[Sample]], Batch]
) -> Iterator[Batch]:
    """Yield batches of consecutive samples; the last one may be smaller."""
    iterator = chain(samples)  # ends once for all: litData's own starts anew when asked again
    while batch := list(islice(iterator, BATCH_SIZE)):
        yield collated(batch)


Epochs = Iterator[Iterator[Batch]]


@dataclass(frozen=True)
class Loader:
    """A library's way to read the corpus."""

    variants: Mapping[str, Callable[[Path], Epochs]]
    """Functions, by name, from the folder of the library's format to its epochs of shuffled
    batches."""
    write: Callable[[Samples, Path], None] | None
    """Writes the corpus in the library's format; None if it reads an existing one."""
    sessions: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Context managers, by variant, that a training run would have anyway."""


def _elastrata() -> Loader:
    """Elastrata: through Ray Data as in a training run, and in process without Ray."""
    from elastrata.driver.ray_session import ray_session
    from elastrata_pipelines.batches import MAX_GROUP_TOKENS, Batches, Start
    from elastrata_pipelines.deal import WorkModel
    from elastrata_pipelines.format import Manifest
    from elastrata_pipelines.order import Order
    from elastrata_pipelines.payload import RankStep, decode
    from elastrata_pipelines.phase import Phase
    from elastrata_pipelines.rows import Rows
    from elastrata_pipelines.storage import Storage
    from elastrata_pipelines.stream import RankStream, descriptors, split_dealt_groups

    epochs_streamed = 64
    """Length of the streamed run, longer than any measurement."""

    def through_ray(folder: Path) -> Iterator[Iterator[Batch]]:
        batches = _batches(folder)
        phases = [Phase(batches=batches, steps=_steps(batches), batch_size=BATCH_SIZE)]
        (split,) = split_dealt_groups(descriptors(phases, Start()), phases, 1)
        return _epochs(RankStream(split, batches.manifest.token_dtype), batches.manifest.samples)

    @contextmanager
    def ray_until_streams_end() -> Iterator[None]:
        """Keep Ray running until the threads of the streams have ended."""
        with ray_session("local"):
            # A thread that calls Ray after its shutdown would fail.
            earlier_threads = set(threading.enumerate())
            yield
            for thread in set(threading.enumerate()) - earlier_threads:
                thread.join(timeout=2)  # Ray may leave one parked for ever, which calls nothing

    def in_process(folder: Path) -> Iterator[Iterator[Batch]]:
        batches = _batches(folder)
        groups = batches.groups(
            Start(), steps=_steps(batches), batch_size=BATCH_SIZE, max_tokens=MAX_GROUP_TOKENS
        )
        stripes = batches.stripes()
        steps = (
            step
            for group in groups
            for payload in batches.payloads(group, 1, stripes)
            for step in decode(payload, batches.manifest.token_dtype)
        )
        return _epochs(steps, batches.manifest.samples)

    def _batches(folder: Path) -> Batches:
        manifest = Manifest.read(Storage(str(folder)))
        return Batches(
            url=str(folder),
            manifest=manifest,
            order=Order(
                num_samples=manifest.samples,
                stripe_size=manifest.stripe_size,
                window_stripes=SHUFFLE_BUFFER // manifest.stripe_size,
                seed=manifest.seed,
            ),
            work=WorkModel(linear=24 * 1024**2, quadratic=4 * 1024),
            tokens_per_micro_batch=BATCH_SIZE * manifest.seq_len,
        )

    def _steps(batches: Batches) -> int:
        return epochs_streamed * batches.manifest.samples // BATCH_SIZE

    def _epochs(steps: Iterable[RankStep], num_samples: int) -> Iterator[Iterator[Batch]]:
        """Split the stream, in which epochs follow each other without a gap, into epochs."""
        by_epoch = groupby(_parts(steps, num_samples), key=itemgetter(0))
        return (map(itemgetter(1), parts) for _, parts in by_epoch)

    def _parts(steps: Iterable[RankStep], num_samples: int) -> Iterator[tuple[int, Batch]]:
        """Yield epoch and batch; a step across two epochs is split into both parts."""
        for step in steps:
            first, last = (
                position // num_samples
                for position in ((step.step - 1) * BATCH_SIZE, step.step * BATCH_SIZE - 1)
            )
            if first == last:
                yield first, (step.rows.tokens, step.rows.lengths)
            else:
                yield from ((epoch, _of_epoch(step.rows, epoch)) for epoch in (first, last))

    def _of_epoch(rows: Rows, epoch: int) -> Batch:
        inside = rows.epochs == epoch
        return rows.tokens[np.repeat(inside, rows.lengths)], rows.lengths[inside]

    variants = {"through Ray Data": through_ray, "in process": in_process}
    sessions = {"through Ray Data": ray_until_streams_end}
    return Loader(variants, None, sessions)


def _grain() -> Loader:
    """grain: ArrayRecord files, shuffled globally, with and without threads and processes."""
    import grain
    from array_record.python.array_record_module import ArrayRecordWriter

    def write(samples: Samples, folder: Path) -> None:
        folder.mkdir()
        writer = ArrayRecordWriter(
            # One sample per group: random access then reads nothing else.
            str(folder / "samples.array_record"),
            "group_size:1,uncompressed",
        )
        for number in range(len(samples)):
            writer.write(samples[number].tobytes())
        writer.close()

    def without_threads(folder: Path) -> Iterator[Iterator[Batch]]:
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        return (iter(_data(folder, seed).to_iter_dataset(options)) for seed in count())

    def with_threads(folder: Path) -> Iterator[Iterator[Batch]]:
        return (iter(_data(folder, seed).to_iter_dataset()) for seed in count())

    def with_workers(folder: Path) -> Iterator[Iterator[Batch]]:
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)
        workers = grain.MultiprocessingOptions(num_workers=WORKERS, per_worker_buffer_size=16)
        return (
            iter(_data(folder, seed).to_iter_dataset(options).mp_prefetch(workers))
            for seed in count()
        )

    def _data(folder: Path, seed: int) -> grain.MapDataset:
        source = grain.sources.ArrayRecordDataSource(str(folder / "samples.array_record"))
        shuffled = grain.MapDataset.source(source).seed(seed).shuffle()
        return shuffled.batch(BATCH_SIZE, batch_fn=collate_bytes)

    variants = {
        "in process": without_threads,
        "16 threads": with_threads,
        f"{WORKERS} workers": with_workers,
    }
    return Loader(variants, write)


def _huggingface() -> Loader:
    """Hugging Face datasets, map style: shuffled by indices, read as Arrow, batch by batch."""
    import datasets
    import pyarrow as pa
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

    def write(samples: Samples, folder: Path) -> None:
        column = pa.ListArray.from_arrays(
            # Arrow's lists have 32-bit offsets: enough for two billion tokens.
            samples.offsets.astype(np.int32),
            pa.array(samples.tokens),
        )
        datasets.Dataset(pa.table({"tokens": column})).save_to_disk(str(folder))

    def alone(folder: Path) -> Iterator[Iterator[Batch]]:
        return (_arrow_epoch(_data(folder, seed)) for seed in count())

    def with_workers(folder: Path) -> Iterator[Iterator[Batch]]:
        return (iter(_loader(_data(folder, seed))) for seed in count())

    def _data(folder: Path, seed: int) -> datasets.Dataset:
        return datasets.load_from_disk(str(folder)).shuffle(seed=seed)

    def _arrow_epoch(data: datasets.Dataset) -> Iterator[Batch]:
        return map(_flat, data.with_format("arrow").iter(BATCH_SIZE))

    def _loader(data: datasets.Dataset) -> DataLoader:
        batches = BatchSampler(SequentialSampler(data), BATCH_SIZE, drop_last=False)
        return DataLoader(
            data.with_format("arrow"),
            # The sampler yields the indices of a whole batch, so that a batch is one read from
            # Arrow.
            sampler=batches,
            batch_size=None,
            collate_fn=_flat,
            num_workers=WORKERS,
            prefetch_factor=16,
        )

    def _flat(table: pa.Table) -> Batch:
        column = table["tokens"].combine_chunks()
        tokens = column.flatten().to_numpy()
        return tokens, np.diff(column.offsets.to_numpy())

    variants = {"in process": alone, f"{WORKERS} workers": with_workers}
    return Loader(variants, write)


def _litdata() -> Loader:
    """litData: optimized chunks, shuffled, with and without torch's worker processes."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    class _Reader:
        """Function that `optimize` calls for each sample, in another process."""

        def __init__(self, samples: Samples) -> None:
            self._samples = samples

        def __call__(self, number: int) -> np.ndarray:
            return self._samples[number].copy()

    def write(samples: Samples, folder: Path) -> None:
        optimize(
            _Reader(samples),
            inputs=list(range(len(samples))),
            output_dir=str(folder),
            chunk_bytes="64MB",
            num_workers=1,
            start_method="fork",
            verbose=False,
        )

    def alone(folder: Path) -> Iterator[Iterator[Batch]]:
        return (batched(data, collate) for data in repeat(_data(folder)))

    def with_workers(folder: Path) -> Iterator[Iterator[Batch]]:
        loader = StreamingDataLoader(
            _data(folder),
            batch_size=BATCH_SIZE,
            num_workers=WORKERS,
            collate_fn=collate,
            persistent_workers=True,
            prefetch_factor=16,
        )
        return map(iter, repeat(loader))

    def _data(folder: Path) -> StreamingDataset:
        return StreamingDataset(str(folder), shuffle=True, drop_last=False)

    variants = {"in process": alone, f"{WORKERS} workers": with_workers}
    return Loader(variants, write)


def _memmap() -> Loader:
    """Plain NumPy: a memory map of all tokens, and a permutation of the samples per epoch."""

    def epochs(folder: Path) -> Iterator[Iterator[Batch]]:
        samples = Samples(folder)
        return (_epoch(samples, seed) for seed in count())

    def _epoch(samples: Samples, seed: int) -> Iterator[Batch]:
        order = np.random.default_rng(seed).permutation(len(samples))
        # Looked up for the whole epoch: an access to the arrays per sample would be slower.
        starts, ends, tokens = samples.offsets[order], samples.offsets[order + 1], samples.tokens
        cuts = [*range(0, len(order), BATCH_SIZE), len(order)]
        for begin, end in pairwise(cuts):
            first, last = starts[begin:end], ends[begin:end]
            parts = [tokens[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)]
            yield np.concatenate(parts), last - first

    variants = {"in process": epochs}
    return Loader(variants, None)


def _mosaicml_streaming() -> Loader:
    """MosaicML Streaming: MDS shards, shuffled, with and without torch's worker processes."""
    # Streaming imports torchvision, whose PyPI build fails at this call with a CPU build of torch.
    # Nothing of torchvision is used here.
    with patch("torch.library.register_fake", lambda *_, **__: lambda function: function):
        from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

    def write(samples: Samples, folder: Path) -> None:
        with MDSWriter(out=str(folder), columns={"tokens": "bytes"}) as writer:
            for number in range(len(samples)):
                writer.write({"tokens": samples[number].tobytes()})

    def alone(folder: Path) -> Iterator[Iterator[Batch]]:
        return (batched(data, _collate) for data in repeat(_data(folder)))

    def with_workers(folder: Path) -> Iterator[Iterator[Batch]]:
        loader = StreamingDataLoader(
            _data(folder),
            batch_size=BATCH_SIZE,
            num_workers=WORKERS,
            collate_fn=_collate,
            persistent_workers=True,
            prefetch_factor=16,
        )
        return map(iter, repeat(loader))

    def _data(folder: Path) -> StreamingDataset:
        return StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH_SIZE)

    def _collate(samples: list[dict[str, bytes]]) -> Batch:
        return collate_bytes([sample["tokens"] for sample in samples])

    variants = {"in process": alone, f"{WORKERS} workers": with_workers}
    return Loader(variants, write)


def _webdataset() -> Loader:
    """webdataset: tar shards, shuffled by shard and buffer, with and without worker processes."""
    import webdataset

    shard_bytes = 32 * 2**20

    def write(samples: Samples, folder: Path) -> None:
        folder.mkdir()
        with webdataset.ShardWriter(
            str(folder / "%05d.tar"), maxsize=shard_bytes, verbose=0
        ) as writer:
            for number in range(len(samples)):
                writer.write({"__key__": f"{number:09d}", "tokens": samples[number].tobytes()})

    def alone(folder: Path) -> Iterator[Iterator[Batch]]:
        return map(iter, repeat(_data(folder)))

    def with_workers(folder: Path) -> Iterator[Iterator[Batch]]:
        loader = webdataset.WebLoader(
            _data(folder),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=WORKERS,
            persistent_workers=True,
            prefetch_factor=16,
        )
        return map(iter, repeat(loader))

    def _data(folder: Path) -> webdataset.WebDataset:
        shards = sorted(map(str, folder.glob("*.tar")))
        data = webdataset.WebDataset(shards, shardshuffle=len(shards)).shuffle(SHUFFLE_BUFFER)
        samples = data.map(itemgetter("tokens"))
        # `partial` keeps the last, smaller batch: every sample must be delivered.
        return samples.batched(BATCH_SIZE, collation_fn=collate_bytes, partial=True)

    def _as_it_is(batch: Batch) -> Batch:
        return batch

    variants = {"in process": alone, f"{WORKERS} workers": with_workers}
    return Loader(variants, write)


LOADERS: Mapping[str, Callable[[], Loader]] = {
    "elastrata": _elastrata,
    "grain": _grain,
    "huggingface": _huggingface,
    "litdata": _litdata,
    "memmap": _memmap,
    "mosaicml_streaming": _mosaicml_streaming,
    "webdataset": _webdataset,
}
# Prefetched batches of the start must not count as speed.
WARM_UP_SECONDS = 1.5
SECONDS = 5.0


def check(epochs: Epochs) -> dict[str, int]:
    """Read one epoch; return its samples, tokens and checksum, which all loaders must agree on."""
    samples = tokens = checksum = 0
    for values, lengths in next(epochs):
        samples, tokens = samples + len(lengths), tokens + len(values)
        for sample in np.split(values, np.cumsum(lengths)[:-1]):
            # A sum, because the loaders' orders differ.
            checksum = (checksum + zlib.crc32(sample.tobytes())) % 2**64
    return {"samples": samples, "tokens": tokens, "checksum": checksum}


def measure(epochs: Epochs, begun: float) -> dict[str, float]:
    """Return tokens per second after a warm-up, over several epochs, and seconds to the first
    batch.

    The transition from one epoch to the next does not count. Every token is read.
    """
    first: float | None = None
    tokens, seconds, total = 0, 0.0, 0
    for epoch in epochs:
        last: float | None = None
        for values, _ in epoch:
            # Reads every token: some loaders return memory maps, which read nothing by themselves.
            total += int(values.sum(dtype=np.uint64))
            now = time.perf_counter()
            first = first or now
            if last and now - first > WARM_UP_SECONDS:
                tokens += len(values)
                seconds += now - last
            last = now
            if seconds >= SECONDS:
                return {
                    "tokens_per_second": tokens / seconds,
                    "seconds_to_first_batch": first - begun,
                }
    raise RuntimeError("the loader ended before the measurement")


def main() -> None:
    action, loader, variant, corpus, folder = sys.argv[1:]
    start_time = time.perf_counter()
    library_loader = LOADERS[loader]()
    import_time = time.perf_counter()
    if action == "write":
        assert library_loader.write
        library_loader.write(Samples(Path(corpus)), Path(folder))
        return
    with library_loader.sessions.get(variant, nullcontext)():
        ready_time = time.perf_counter()
        loader = library_loader.variants[variant]
        # No name keeps the epochs: they must end before the session does.
        result: dict[str, Any] = (
            check(loader(Path(folder)))
            if action == "check"
            else measure(loader(Path(folder)), ready_time)
        )
    result |= {
        "seconds_to_import": import_time - start_time,
        "seconds_to_start_ray": ready_time - import_time,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
