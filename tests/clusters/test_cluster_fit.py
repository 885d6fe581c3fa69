"""`elastrata doctor --cluster`: whether a recipe can ever run on the cluster of a file."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from elastrata.cli.main import run
from elastrata.deploy.clusters import ClusterSpec, NodeGroup

SIZES = st.integers(0, 4)


def _checks(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, str]]:
    run(["doctor", *arguments, "--json"])
    result = json.loads(capsys.readouterr().out)
    return {check["name"]: check for check in result["checks"]}


def _write(folder: Path, values: object) -> str:
    path = folder / "mine.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def _launcher(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "cluster_name": "mine",
        "provider": {"type": "aws"},
        "max_workers": 3,
        "head_node_type": "head",
        "available_node_types": {
            "head": {"resources": {"CPU": 0}, "node_config": {}},
            "small": {"resources": {"CPU": 4, "GPU": 1}, "node_config": {}, "max_workers": 2},
            "large": {"resources": {"CPU": 16, "GPU": 4}, "node_config": {}, "max_workers": 2},
        },
    }
    return {**values, **changes}


def test_a_recipe_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = _checks(capsys, "bert/base", "workers.max=64", "--cluster", "aws")
    assert {check["status"] for check in found.values()} == {"ok"}
    assert found["worker"]["found"].startswith("0.5 CPU + 1 GPU: 4 on a node of gpu-l40s")
    assert found["workers.max"]["found"] == "64, but at most 64 fit"
    assert found["niceness"]["found"] == "aws: RAY_worker_niceness is set"


def test_requests_beyond_what_the_file_can_ever_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _write(tmp_path, _launcher())
    arguments = ("bert/base", "workers.min=10", "workers.max=20", "--cluster", file)
    assert run(["doctor", *arguments]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "FAIL workers.min  10, but at most 9 fit" in lines
    assert "warn workers.max  20, but at most 9 fit" in lines
    assert "problems to fix: 1" in lines
    assert any("workers.max=9" in line for line in lines)


def test_a_worker_larger_than_any_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _write(tmp_path, _launcher())
    found = _checks(capsys, "bert/base", "workers.gpus=8", "--cluster", file)
    assert found["worker"]["status"] == "problem"
    assert found["niceness"]["status"] == "warning"
    assert "RAY_worker_niceness=0 in the environment of every" in found["niceness"]["advice"]
    assert found["worker"]["found"] == "0.5 CPU + 8 GPU: more than any node has"


def test_workers_that_leave_no_cpu_to_read_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _write(tmp_path, _launcher())
    settings = ("workers.cpus=4", "workers.gpus=0", "workers.max=9")
    found = _checks(capsys, "bert/base", *settings, "--cluster", file)
    assert found["reading"]["status"] == "warning"
    assert found["reading"]["found"] == "0 CPUs left besides 9 workers"


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        (_launcher(max_worker=4), ["max_worker: unknown key (did you mean 'max_workers'?)"]),
        (
            _launcher(max_workers=-1, cluster_name=3),
            [
                "max_workers: -1: expected a whole number at least 0",
                "cluster_name: 3: expected text",
            ],
        ),
        (
            _launcher(head_node_type="hed"),
            ["head_node_type: 'hed': expected one of head, large"],
        ),
        ({"steps": 3}, ["expected a file for Ray's cluster launcher, with `provider`, or a "]),
        ("a: [", ["1: not valid YAML: "]),
        (
            {"kind": "RayCluster", "spec": {"headGroupSpec": {"template": {"spec": {}}}}},
            ["spec.headGroupSpec.template.spec.containers: missing: expected "],
        ),
        (
            {"cluster_name": "x", "provider": {"type": "local", "worker_ips": []}},
            ["head_start_ray_commands: no --num-cpus: the file does not say"],
        ),
    ],
)
def test_mistakes_in_a_cluster_file_take_a_line_each(
    values: object, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _write(tmp_path, values)
    assert run(["doctor", "--cluster", file]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(lines)
    for line in lines:
        assert any(one.startswith(file) and line in one for one in told), told


def test_a_recipe_without_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "bert/base"]) == 2
    assert capsys.readouterr().err.startswith("bert/base: requires --cluster FILE")


@given(
    sizes=st.lists(st.tuples(SIZES, SIZES, SIZES, SIZES), min_size=1, max_size=3),
    max_nodes=st.integers(0, 8),
)
def test_the_room_is_that_of_the_best_choice_of_nodes(
    sizes: list[tuple[int, int, int, int]], max_nodes: int
) -> None:
    """Against every choice of nodes that the file allows, one by one."""
    groups = tuple(
        NodeGroup(
            name=str(number),
            resources={"CPU": cpus, "GPU": gpus},
            min_nodes=low,
            max_nodes=low + more,
        )
        for number, (cpus, gpus, low, more) in enumerate(sizes)
    )
    max_nodes += sum(group.min_nodes for group in groups)
    head = NodeGroup(name="head", resources={"CPU": 1}, min_nodes=1, max_nodes=1)
    cluster = ClusterSpec(file="f", head=head, groups=groups, max_nodes=max_nodes)
    worker = {"CPU": 1.0, "GPU": 0.5}
    choices = product(*(range(group.min_nodes, group.max_nodes + 1) for group in groups))
    best = max(
        sum(count * group.room(worker) for count, group in zip(counts, groups, strict=True))
        for counts in choices
        if sum(counts) <= max_nodes
    )
    assert cluster.room(worker) == best
