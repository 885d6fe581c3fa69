"""In-memory replicas on five nodes: whole second copies beside the parity of two and of four nodes.

    python benchmarks/parity.py

Every node's writer gives a part of a state to the stores, all at the same time. Then the store of
one node is killed, and a process on another node reads the part that it had: from the second copy,
or rebuilt from the parity and the parts of the others. The nodes are processes of this machine, so
times are those of its memory, not of a network; the bytes are those of any. `written_s`: until all
parts are safe; `read_s`: of a part that its own node has; `lost_read_s`: of the lost one, after the
list of files was made anew; `fullest_node` and `all_nodes`: bytes held, over those of the parts.
Medians over the rounds. Writes benchmarks/results/parity.json.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import ray
from harness import medians, parser_of, write_result

from elastrata.replicas.parity import ParityPlan
from elastrata.replicas.storage import close_replicas, open_replicas
from support.actors import answers, driver_of_nodes, head_id, on_node

NODES = 5
SIZES = (1, 2, 4)
"""Nodes whose parts share a second copy; 1: none do."""
PART = 128 * 2**20
FOLDER = "000000001-0001-0a1b2c"


class PartWriter:
    """Writes and reads parts on the node it runs on."""

    def write(self, replicas: Any, plan: ParityPlan, rank: int) -> None:
        replicas.hold_parity(plan, rank)
        replicas.write(self.part(rank), FOLDER, f"__{rank}_0.distcp")

    def read(self, replicas: Any, rank: int) -> float:
        began = time.perf_counter()
        found = replicas.read(FOLDER, f"__{rank}_0.distcp")
        seconds = time.perf_counter() - began
        assert found == self.part(rank)
        return seconds

    def part(self, rank: int) -> bytes:
        return np.random.default_rng(rank).bytes(PART)


def measure(nodes: tuple[str, ...], size: int) -> dict[str, float]:
    plan, replicas = ParityPlan(nodes, size), open_replicas(8 * PART)
    writers = [on_node(node, PartWriter) for node in nodes]
    answers(*(writer.part.remote(0) for writer in writers))
    began = time.perf_counter()
    answers(*(writer.write.remote(replicas, plan, rank) for rank, writer in enumerate(writers)))
    written = time.perf_counter() - began
    held = replicas.usage()
    (own,) = answers(writers[1].read.remote(replicas, 1))
    (listing,) = answers(replicas.registry.listing.remote())
    (pid,) = answers(listing.stores[nodes[0]].__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    (lost,) = answers(writers[1].read.remote(replicas, 0))
    for writer in writers:
        ray.kill(writer)
    close_replicas(replicas)
    return {
        "written_s": written,
        "read_s": own,
        "lost_read_s": lost,
        "fullest_node": max(held.values()) / PART,
        "all_nodes": sum(held.values()) / PART / len(nodes),
    }


def main() -> None:
    rounds = parser_of(__doc__, rounds=5).parse_args().rounds
    found: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
    with driver_of_nodes() as cluster:
        nodes = (head_id(), *(cluster.add(0).node_id for _ in range(NODES - 1)))
        for _ in range(rounds):
            for size in SIZES:
                found[size].append(measure(nodes, size))
    figures = {
        "nodes": NODES,
        "part_mb": PART / 1e6,
        "rounds": rounds,
        "parity_of": {str(size): medians(each, 3) for size, each in found.items()},
    }
    write_result("parity", figures, ("ray", "numpy"))


if __name__ == "__main__":
    main()
