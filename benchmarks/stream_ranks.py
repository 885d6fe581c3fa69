"""How many ranks one stream feeds: steps per second by the number of ranks.

    PYTHONPATH=tests python benchmarks/stream_ranks.py
    PYTHONPATH=tests python benchmarks/stream_ranks.py --ranks 8 64 --version-before CHECKOUT

Ray Data, its coordinator and the readers are real. The ranks are threads of one process that decode
their parts and do nothing else, so that the figures are a limit of the stream. Compares one
consumer for each node of eight ranks with one consumer for each rank, on synthetic samples of 134
tokens on average, 16 for a rank and step. With `--hand-over`, measures how fast one rank hands
parts to seven others of its node, each a process. Medians over the rounds; every round takes the
cases in random order. Writes `results/stream_ranks.json`.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import medians, of_version, parser_of, write_result

SAMPLES, SAMPLES_PER_RANK, PER_NODE = 200_000, 16, 8
RANKS = (8, 64, 256, 1024, 4096)
ALONE_UP_TO = 256
"""With a consumer for each rank, more ranks take minutes for their first step."""
SECONDS_TO_START, SECONDS = 240.0, 15.0


def write_samples(folder: Path) -> None:
    """Write the data set."""
    from support.synthetic import Sizes, write_data_set

    write_data_set(
        folder, samples=SAMPLES, sizes=Sizes(seq_len=512, stripe=512, stripes_per_shard=32)
    )


def measure(folder: str, ranks: int, per_node: int) -> dict[str, float]:
    """Return the rate at which `ranks` ranks get their steps, and what that takes."""
    import ray

    from elastrata_pipelines.batches import Batches, Start
    from elastrata_pipelines.deal import WorkModel
    from elastrata_pipelines.format import Manifest
    from elastrata_pipelines.order import Order
    from elastrata_pipelines.payload import decode
    from elastrata_pipelines.phase import Phase
    from elastrata_pipelines.storage import Storage
    from elastrata_pipelines.stream import descriptors, split_dealt_groups

    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=3 * 2**30,
        log_to_driver=False,
        logging_level="error",
        include_dashboard=False,
    )
    manifest = Manifest.read(Storage(folder))
    batches = Batches(
        url=folder,
        manifest=manifest,
        order=Order(
            num_samples=manifest.samples,
            stripe_size=manifest.stripe_size,
            window_stripes=16,
            seed=manifest.seed,
        ),
        work=WorkModel(linear=24 * 1024, quadratic=4),
        tokens_per_micro_batch=SAMPLES_PER_RANK * manifest.seq_len,
    )
    phases = [Phase(batches=batches, steps=100_000, batch_size=ranks * SAMPLES_PER_RANK)]
    begin = time.perf_counter()
    try:
        from elastrata_pipelines.node_rows import SharedRows
        from elastrata_pipelines.stream import tables_of
    except ImportError:  # the version before: one split for every rank, of payloads
        from elastrata_pipelines.stream import RankStream

        consumers = split_dealt_groups(descriptors(phases, Start()), phases, ranks)

        def steps_of(consumer: Any) -> Iterator[int]:
            for step in RankStream(consumer, manifest.token_dtype):
                yield step.step
    else:
        nodes = [str(rank // per_node) for rank in range(ranks)]
        splits = split_dealt_groups(descriptors(phases, Start()), phases, nodes)
        consumers = splits[::per_node]

        def steps_of(consumer: Any) -> Iterator[int]:
            rows = SharedRows(tables_of(consumer))
            while (row := rows.take(0)) is not None:
                for rank in row.origin.ranks[:-1]:
                    for _ in decode(row.part(rank), manifest.token_dtype):
                        pass
                for step in decode(row.part(row.origin.ranks[-1]), manifest.token_dtype):
                    yield step.step

    done, firsts = [0] * len(consumers), [0.0] * len(consumers)
    is_ready = threading.Event()

    def consume(number: int) -> None:
        for step in steps_of(consumers[number]):
            done[number] = step
            if not firsts[number]:
                firsts[number] = time.perf_counter() - begin
                if all(firsts):
                    is_ready.set()

    for number in range(len(consumers)):
        threading.Thread(target=consume, args=(number,), daemon=True).start()
    if not is_ready.wait(SECONDS_TO_START):
        return {"first_step_seconds": math.inf, "steps_per_second": 0.0}
    # Until groups have their full size.
    settled = threading.Event()
    window = SECONDS if ranks < 2048 else 4 * SECONDS  # a group takes that many ten seconds
    settled.wait(window / 2)
    before, cpu, clock = min(done), cpu_seconds(), time.perf_counter()
    settled.wait(window)
    steps, seconds = min(done) - before, time.perf_counter() - clock
    used = {name: value - cpu.get(name, 0.0) for name, value in cpu_seconds().items()}
    memory = {
        name: sum(process.memory_info().rss for process in found) / 2**20
        for name, found in processes().items()
    }
    return {
        "first_step_seconds": round(max(firsts), 2),
        "steps_per_second": round(steps / seconds, 3),
        **{f"cpu_ms_per_step_{name}": round(1e3 * used[name] / max(1, steps), 2) for name in used},
        **{f"resident_mib_{name}": round(memory[name]) for name in memory},
    }


def processes() -> dict[str, list[psutil.Process]]:
    """Return this process, the coordinator and the readers."""
    found: dict[str, list[psutil.Process]] = {"ranks": [psutil.Process()]}
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith("ray::SplitCoordinator"):
            found.setdefault("coordinator", []).append(process)
        elif title.startswith(("ray::Map", "ray::IDLE")):
            found.setdefault("readers", []).append(process)
    return found


def cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds of the same processes so far."""
    return {
        name: sum(sum(process.cpu_times()[:2]) for process in found)
        for name, found in processes().items()
    }


def hand_over(ranks: int = PER_NODE, groups: int = 200, size: int = 2**20) -> dict[str, float]:
    """Return the rate at which a rank hands 1 MiB parts to the other ranks of its node."""
    import pyarrow as pa

    from elastrata_pipelines.node_rows import NodeRow, Origin, RowServer, SharedRows

    origin = Origin(
        stream="s", num_ranks=ranks, ranks=tuple(range(ranks)), first_step=0, num_steps=1
    )
    parts = [pa.py_buffer(np.random.default_rng(rank).bytes(size)) for rank in range(ranks)]
    table = NodeRow.joined(origin, parts).to_table()
    rows = SharedRows(iter([table] * groups), ranks)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(1, ranks)]
    others = [
        context.Process(target=_receive, args=(there, rank, ranks))
        for rank, (_, there) in enumerate(pipes, start=1)
    ]
    server = RowServer(rows, ranks - 1, num_ranks=ranks, node="n")
    for other, (here, _) in zip(others, pipes, strict=True):
        other.start()
        here.send(server.address)
    for here, _ in pipes:
        here.recv()
    begin = time.perf_counter()
    for here, _ in pipes:
        here.send("go")
    while rows.take(0) is not None:
        pass
    for here, _ in pipes:
        here.recv()
    seconds = time.perf_counter() - begin
    for other in others:
        other.join()
    server.close()
    return {
        "groups_per_second": round(groups / seconds, 1),
        "mb_per_second": round((ranks - 1) * groups * size / seconds / 1e6),
    }


def _receive(pipe: Connection, rank: int, ranks: int) -> None:
    from elastrata_pipelines.node_rows import parts_from

    parts = parts_from(pipe.recv(), rank, num_ranks=ranks, node="n")
    pipe.send("ready")
    pipe.recv()
    for _ in parts:
        pass
    pipe.send("done")


def order_and_deal(folder: str, ranks: int = 1024) -> dict[str, float]:
    """Return the time of the deal of one batch, and of the first position of a long epoch."""
    from elastrata_pipelines.deal import WorkModel, deal
    from elastrata_pipelines.order import Order

    lengths = np.random.default_rng(0).integers(8, 512, ranks * SAMPLES_PER_RANK)
    work = WorkModel(linear=24 * 1024, quadratic=4)
    begin = time.perf_counter()
    deal(lengths, num_ranks=ranks, work=work, tokens_per_micro_batch=8192)
    dealt = time.perf_counter()
    stripes = 4_000_000
    order = Order(num_samples=stripes * 512, stripe_size=512, window_stripes=16, seed=1)
    order.places(0, 1)
    return {
        "deal_seconds": round(dealt - begin, 4),
        "first_position_of_4M_stripes_seconds": round(time.perf_counter() - dealt, 3),
    }


def slope(rates: dict[int, float], first: int, last: int) -> float:
    """Return by which power of the number of ranks the seconds of a step grow."""
    return round(math.log(rates[first] / rates[last]) / math.log(last / first), 2)


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--ranks", nargs="*", type=int, default=list(RANKS))
    parser.add_argument("--before", type=Path, help="checkout of an earlier version")
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "RANKS", "PER_NODE"))
    arguments = parser.parse_args()
    if arguments.one:
        folder, ranks, per_node = arguments.one
        print(json.dumps(measure(folder, int(ranks), int(per_node))), flush=True)
        sys.stdout.flush()
        os._exit(0)  # thousands of threads wait for Ray
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        write_samples(Path(folder))
        cases = [
            (f"{ranks} ranks, {PER_NODE} a node", None, ranks, PER_NODE)
            for ranks in arguments.ranks
        ]
        cases += [
            (f"{ranks} ranks, {name}", checkout, ranks, 1)
            for name, checkout in (("1 a node", None), ("before", arguments.before))
            if name != "before" or checkout
            for ranks in arguments.ranks
            if ranks <= ALONE_UP_TO
        ]
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name, *_ in cases}
        for number in range(arguments.rounds):
            for name, checkout, ranks, per_node in random.Random(number).sample(cases, len(cases)):
                figures = of_version(checkout, "--one", folder, str(ranks), str(per_node))
                rounds[name].append(figures)
                print(name, figures, flush=True)
        results = {name: medians(figures, 3) for name, figures in rounds.items()}
        rates = {
            ranks: results[f"{ranks} ranks, {PER_NODE} a node"]["steps_per_second"]
            for ranks in arguments.ranks
        }
        figures = {
            "results": results,
            "slope_from_64_to_1024": slope(rates, 64, 1024) if {64, 1024} <= set(rates) else None,
            "hand_over_to_7_ranks": medians([hand_over() for _ in range(arguments.rounds)]),
            **medians([order_and_deal(folder) for _ in range(arguments.rounds)]),
        }
    write_result("stream_ranks", figures, ("elastrata", "ray", "pyarrow"))


if __name__ == "__main__":
    main()
