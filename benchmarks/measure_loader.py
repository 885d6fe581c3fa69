"""One process of benchmarks/data_loading.py: writes, checks or measures one loader.

    python benchmarks/measure_loader.py write|check|measure LOADER VARIANT CORPUS FOLDER

Prints one JSON object as its last line.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from data_loaders.samples import Batch, Samples

WARM_UP_SECONDS = 1.5
SECONDS = 5.0
Epochs = Iterator[Iterator[Batch]]


def check(epochs: Epochs) -> dict[str, int]:
    """One epoch, whole: what must be equal for all loaders, whatever their order."""
    samples = tokens = checksum = 0
    for values, lengths in next(epochs):
        samples, tokens = samples + len(lengths), tokens + len(values)
        for sample in np.split(values, np.cumsum(lengths)[:-1]):
            checksum = (checksum + zlib.crc32(sample.tobytes())) % 2**64
    return {"samples": samples, "tokens": tokens, "checksum": checksum}


def measure(epochs: Epochs, begun: float) -> dict[str, float]:
    """Tokens per second after a warm-up, epoch after epoch, and seconds to the first batch.

    The change from one epoch to the next is not counted. Every token is read.
    """
    first: float | None = None
    tokens, seconds, total = 0, 0.0, 0
    for epoch in epochs:
        last: float | None = None
        for values, _ in epoch:
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
    begun = time.perf_counter()
    module: Any = import_module(f"data_loaders.{loader}")
    imported = time.perf_counter()
    if action == "write":
        module.write(Samples(Path(corpus)), Path(folder))
        return
    with getattr(module, "SESSIONS", {}).get(variant, nullcontext)():
        ready = time.perf_counter()
        loader = module.VARIANTS[variant]
        # No name keeps the epochs: they must end before the session does.
        result: dict[str, Any] = (
            check(loader(Path(folder)))
            if action == "check"
            else measure(loader(Path(folder)), ready)
        )
    result |= {"seconds_to_import": imported - begun, "seconds_to_start_ray": ready - imported}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
