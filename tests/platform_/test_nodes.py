"""Nodes that new workers keep off."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
import torch

from elastrata.cluster import nodes
from elastrata.driver.doctor import examine
from elastrata.driver.launch import train
from elastrata.driver.ray_session import ray_session
from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import read_identity
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from support.command import wait_until
from support.nodes import nodes as cluster_of_nodes
from support.synthetic import tiny_recipe, write_data_set


@pytest.mark.matrix  # a cluster of three nodes
def test_a_killed_node_is_missed_before_ray_misses_it() -> None:
    with cluster_of_nodes() as cluster:
        gone, staying = cluster.add(cpus=1), cluster.add(cpus=1)
        with ray_session(cluster.address):
            wait_until(lambda: ray.cluster_resources().get("CPU") == 2, 30, "two nodes")
            assert nodes.unreachable_node_ids() == frozenset()
            findings = examine(storage=None, tracking=None, address=cluster.address)
            priority = next(finding for finding in findings if finding.name == "niceness")
            assert (priority.status, priority.found) == ("warning", "workers run at nice 15")
            assert priority.advice.startswith("RAY_worker_niceness=0 in the environment of every")
            cluster.kill(gone)
            wait_until(lambda: gone.node_id not in _counted_on(), 60, "the end of its raylet")
            assert staying.node_id in _counted_on()

            selector = nodes.selector_excluding([gone.node_id])
            placed = ray.util.placement_group([{"CPU": 1}], bundle_label_selector=[selector])
            ray.get(placed.ready(), timeout=30)
            table = ray.util.placement_group_table(placed)
            assert list(table["bundles_to_node_id"].values()) == [staying.node_id]


@pytest.mark.matrix  # a cluster of two nodes
@pytest.mark.skipif(torch.version.cuda is not None, reason="a PyTorch with CUDA")
def test_a_torch_that_cannot_use_rays_gpus_is_refused(tmp_path: Path) -> None:
    write_data_set(tmp_path / "data", samples=64)
    recipe = Recipe.model_validate(tiny_recipe(tmp_path / "data", tmp_path / "runs"))
    with cluster_of_nodes() as cluster:
        cluster.add(cpus=2, num_gpus=1)
        with ray_session(cluster.address):
            wait_until(lambda: ray.cluster_resources().get("GPU") == 1, 30, "the node")
            findings = list(examine(storage=None, tracking=None, address=cluster.address))
            (gpus,) = (finding for finding in findings if finding.name == "ray's gpus")
            assert gpus.status == "problem"
            assert "is built without CUDA" in gpus.found
            assert gpus.advice.startswith("install a build with it: pip install ")
            with pytest.raises(UserError) as refused:
                train(recipe, name="run", show=lambda _: None)
    (line,) = refused.value.problems
    assert line.startswith("workers.gpus: 1: node ")
    assert "is built without CUDA; install a build with it: pip install" in line
    assert read_identity(Storage(recipe.storage).sub("run")) is None


def test_a_selector_for_other_nodes() -> None:
    assert nodes.selector_excluding([]) is None
    assert nodes.selector_excluding(["b", "a"]) == {"ray.io/node-id": "!in(a, b)"}


def _counted_on() -> set[str]:
    """The nodes that Ray takes for alive and that take a connection."""
    alive = {str(node["NodeID"]) for node in nodes.list_nodes() if node["Alive"]}
    return alive - nodes.unreachable_node_ids()
