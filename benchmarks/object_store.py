"""Tokens per second with the data on S3, beside the same on this machine's disk.

    PYTHONPATH=tests python benchmarks/object_store.py

The S3 server is Ceph's (Debian's radosgw, ceph-mon and ceph-osd), in memory, on the cores that also
train. Disk and server take turns, and the median over the rounds of the ratio of their tokens per
second counts: of training BERT-tiny on samples of up to 512 tokens, one worker with one thread, its
storage on disk either way; and of the input pipeline alone, through Ray Data to one worker, which
does nothing but read. Nothing that was read is kept for later by the client; disk reads are from
the page cache.
"""

from __future__ import annotations

import statistics
import tempfile
from typing import Any

from harness import parser_of, write_result
from processes import last_line, trained_steps

from support.ceph import BUCKET, ceph
from support.synthetic import Sizes, write_data_set

RECIPE = "bert/tiny"
STEPS, WARM_UP, BATCH = 150, 30, 32
READ_STEPS, READ_WARM_UP, READ_BATCH = 800, 200, 512
SAMPLES, SIZES = 2**18, Sizes(seq_len=512, stripe=1024, stripes_per_shard=16)
DISK, S3 = "disk", "s3"


def trained(data: str) -> dict[str, float]:
    """The rates of training after its first steps."""
    overrides = (
        *(f"data.path={data}", f"steps={STEPS}", f"batch_size={BATCH}"),
        *("schedule.warmup_steps=0", "workers.max=1", "workers.threads=1"),
        *("workers.spares=false", "evaluation.every=100000", "checkpoint.every=100000"),
    )
    counted = trained_steps(RECIPE, *overrides)[WARM_UP:]
    seconds = counted[-1]["time"] - counted[0]["time"]
    return {
        "tokens_per_second": sum(step["batch_tokens"] for step in counted[1:]) / seconds,
        "seconds_waiting_for_data": sum(step["seconds_waiting_for_data"] for step in counted[1:]),
    }


def read(data: str) -> dict[str, float]:
    """The rates of the input pipeline alone."""
    steps = ("--workers", "1", "--steps", str(READ_STEPS), "--warm-up", str(READ_WARM_UP))
    overrides = (f"data.path={data}", f"batch_size={READ_BATCH}")
    command = ["elastrata", "bench", "data", RECIPE, *overrides, *steps, "--json"]
    found = last_line(command)
    return {name: found[name] for name in ("tokens_per_second", "seconds_to_first_batch")}


def rounds_of(measure: Any, places: dict[str, str], count: int) -> dict[str, Any]:
    """So many rounds, and their medians; who is first changes from round to round."""
    rounds = []
    for number in range(count):
        order = list(places)[:: 1 if number % 2 == 0 else -1]
        found = {place: measure(places[place]) for place in order}
        rounds.append({place: found[place] for place in places})
        print(rounds[-1], flush=True)
    rates = {place: [one[place]["tokens_per_second"] for one in rounds] for place in places}
    ratios = [s3 / disk for s3, disk in zip(rates[S3], rates[DISK], strict=True)]
    return {
        "s3_over_disk": round(statistics.median(ratios), 4),
        **{f"{place}_tokens_per_second": round(statistics.median(rates[place])) for place in rates},
        "rounds": [
            {place: {name: round(x, 4) for name, x in one[place].items()} for place in places}
            for one in rounds
        ],
    }


def main() -> None:
    arguments = parser_of(__doc__, rounds=5).parse_args()
    with tempfile.TemporaryDirectory() as folder, ceph():
        places = {DISK: f"{folder}/data", S3: f"s3://{BUCKET}/data"}
        disk, s3 = (write_data_set(place, SAMPLES, sizes=SIZES) for place in places.values())
        assert disk == s3
        figures = {
            "data": {"samples": disk.samples, "tokens": disk.tokens, "shards": len(disk.shards)},
            "training": rounds_of(trained, places, arguments.rounds),
            "reading_alone": rounds_of(read, places, arguments.rounds),
        }
    write_result("object_store", figures, ("elastrata", "ray", "torch", "pyarrow", "s3fs"))


if __name__ == "__main__":
    main()
