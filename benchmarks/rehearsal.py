"""Rehearsals of large layouts: the time and the memory they take, and how near the plan is.

    python benchmarks/rehearsal.py [CASE]...

A case is rehearsed in processes of its own, one for each rank that differs. Seconds are those on
the clock, which other work on the machine stretches, and those of all cores. Memory is at most that
of the largest process times their number: what forks share counts for each. Writes
results/rehearsal.json; cases that are not named stay as they were.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from multiprocessing.connection import Connection
from typing import Any

from harness import known_result, parser_of, write_result

from elastrata.rehearsal.process import Request, rehearse

_TENSOR_PIPELINE = ("parallel.tensor=8", "parallel.pipeline=4", "parallel.replicate=4")
CASES = {
    "gpt/7b, 64 GPUs, HSDP 8 x 8": Request(
        recipe="gpt/7b",
        overrides=("parallel.replicate=8",),
        cluster="64xH100-80GB",
    ),
    "gpt/7b, 1,024 GPUs, FSDP": Request(
        recipe="gpt/7b",
        overrides=(),
        cluster="1024xH100-80GB",
    ),
    "gpt/7b, 1,024 GPUs, TP 8 x PP 4 x HSDP 4 x 8": Request(
        recipe="gpt/7b",
        overrides=_TENSOR_PIPELINE,
        cluster="1024xH100-80GB",
    ),
    "7 B widths in 8 layers, 1,024 GPUs, TP 8 x PP 4 x HSDP 4 x 8": Request(
        recipe="gpt/7b",
        overrides=(*_TENSOR_PIPELINE, "workload.num_layers=8"),
        cluster="1024xH100-80GB",
    ),
}


def measure(request: Request, answer: Connection) -> None:
    """Runs in a process of its own, whose children are those of this rehearsal alone."""
    began = time.perf_counter()
    figures = rehearse(request)
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processes = len(figures["ranks"]) + 1 + (figures["graphs"] is not None)
    answer.send(
        {
            "overrides": list(request.overrides),
            "layout": figures["layout"],
            "seconds": round(seconds, 1),
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
            "processes": processes,
            "gb_of_largest_process": round(used.ru_maxrss * 1024 / 1e9, 3),
            "gb_at_most": round(processes * used.ru_maxrss * 1024 / 1e9, 3),
            "graphs": figures["graphs"],
            "ranks": [_rank(rank) for rank in figures["ranks"]],
        }
    )


def _rank(rank: dict[str, Any]) -> dict[str, Any]:
    return {
        "rank": rank["rank"],
        "micro_batches": rank["micro_batches"],
        "peak_gib": round(rank["peak_bytes"] / 2**30, 2),
        "planned_gib": round(rank["planned_bytes"] / 2**30, 2),
        "messages": sum(message["count"] for message in rank["messages"]),
        "message_gb": round(sum(message["bytes"] for message in rank["messages"]) / 1e9, 2),
        "waits": sum(wait["count"] for wait in rank["waits"]),
        "copies_of_a_save": sum(copy["count"] for copy in rank["saving"]["copies"]),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", help=f"of: {'; '.join(CASES)}")
    arguments = parser.parse_args()
    figures = known_result("rehearsal")
    for name in arguments.cases or CASES:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=measure, args=(CASES[name], theirs))
        process.start()
        figures[name] = ours.recv()
        process.join()
    write_result("rehearsal", figures, ["torch"])


if __name__ == "__main__":
    main()
