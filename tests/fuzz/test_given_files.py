"""Damaged files that a command is given: clusters for `plan`, traces and tables for `simulate`.
Each is refused in lines that name the file, or read. Never a raw exception or a hang."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from elastrata.planner.cluster import read_cluster
from elastrata.recipe.yaml_values import dump_yaml
from elastrata.simulation.simulate import read_recovery
from elastrata.simulation.trace import read_trace
from support.mutations import Mutation, mutated, mutated_json, mutations, quick, seeds
from support.verdict import read_or_refused

CASES = quick(60)
CLUSTER = {
    "device": "A100-80GB",
    "devices": 64,
    "per_node": 8,
    "memory_gb": 79.5,
    "peak_tflops": 280,
    "link_gb_per_second": 240,
    "network_gbit": 200,
    "price": 3.5,
    "spot_price": 1.25,
}
EVENTS = "seconds,event,workers\n0,join,8\n60.5,lose,2\n90,drain,1\n99,driver,1\n"
MEDIANS = {
    kind: {"next_step_after_s": {"median": seconds}}
    for kind, seconds in (
        ("node killed", 17.5), ("node drained", 10), ("node added", 13), ("driver killed", 33),
    )
}  # fmt: skip
READERS: dict[str, Callable[[str], Any]] = {
    "cluster.yaml": read_cluster,
    "trace.csv": read_trace,
    "recovery.json": read_recovery,
}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    for name in READERS:
        (folder / name).mkdir()
    (folder / "cluster.yaml" / "cluster.yaml").write_text(dump_yaml(CLUSTER), encoding="utf-8")
    (folder / "trace.csv" / "trace.csv").write_text(EVENTS, encoding="utf-8")
    (folder / "recovery.json" / "recovery.json").write_text(
        json.dumps({"kinds": MEDIANS}), encoding="utf-8"
    )
    return folder


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_refused_or_read(given: Path, name: str, seed: int) -> None:
    folder, rng = given / name, random.Random(seed)
    data = json.dumps(CLUSTER).encode() if name == "cluster.yaml" else None  # YAML is JSON, too
    data = data or (folder / name).read_bytes()
    altered = [found for _ in range(CASES) if (found := mutated_json(data, rng)) is not None]
    drawn = [
        *islice(mutations(folder, rng), CASES),
        *(Mutation(what, partial(_put, name, text)) for what, text in altered),
    ]
    refused = 0
    for mutation in drawn:
        with mutated(folder, mutation) as copy:
            read = partial(READERS[name], str(copy / name))
            case = f"seed {seed}: {mutation.name}"
            refused += read_or_refused(read, case, str(copy / name), "--cluster") is None
    assert refused > CASES // 2


def _put(name: str, text: bytes, copy: Path) -> None:
    (copy / name).write_bytes(text)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f"0,join,{'9' * 5000}", "workers"),
        (f"{'x' * 200_000},join,1", "seconds"),
        ("nan,join,1", "seconds"),
        ('0,"join,1', "event"),
        ("0,join,\u0663", "workers"),
        ("0,join,1,2", "4 values"),
    ],
)
def test_a_line_of_a_trace_is_refused_by_its_number(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"seconds,event,workers\n0,join,1\n{line}\n", encoding="utf-8")
    found = []
    assert read_or_refused(lambda: found.append(read_trace(str(path))), line[:20], why) is None
    assert found == []


@pytest.mark.parametrize("median", [True, -1, float("nan"), float("inf"), 10**400, "3", None])
def test_a_median_is_a_number_of_seconds(tmp_path: Path, median: Any) -> None:
    kinds = {**MEDIANS, "node added": {"next_step_after_s": {"median": median}}}
    path = tmp_path / "recovery.json"
    path.write_text(json.dumps({"kinds": kinds}), encoding="utf-8")
    assert read_or_refused(partial(read_recovery, str(path)), str(median), str(path)) is None
