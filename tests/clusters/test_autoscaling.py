"""Autoscaling, really: Ray's autoscaler starts and stops the nodes that a run asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elastrata.shipped import cluster_files
from support.command import run
from support.live_run import LiveRun
from support.served import served
from support.short_steps import write_recipe

STEPS = 3000
FIRST_NODE = "f" * 51 + "00001"
"""The id that Ray's provider of nodes on one machine gives to the first node."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_grows_to_what_the_file_allows_and_makes_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for more than there can ever be: the autoscaler would launch nothing for that."""
    launcher = yaml.safe_load((cluster_files() / "raylets.yaml").read_text())
    launcher["available_node_types"]["small"]["min_workers"] = 1
    recipe = write_recipe(tmp_path, steps=STEPS)
    settings = ("workers.max=8", "workers.cpus=2", "workers.gpus=0")
    with served(launcher) as cluster:
        for name, value in cluster.settings.items():
            monkeypatch.setenv(name, value)
        address = ("--address", cluster.gcs_address)
        live = LiveRun(recipe, "auto", tmp_path / "log", *address, *settings)
        live.wait_for_size(3, number=2, steps=100, seconds=400)
        drained = run("guard", "--now", "100", *address, "--node", FIRST_NODE)
        assert drained.returncode == 0, drained.stderr
        live.end()
    sizes = [entry["world_size"] for entry in live.of_kind("started")]
    assert sizes[0] == 1
    assert max(sizes) == 3
    assert 2 in sizes[sizes.index(3) :]
    assert live.rolled_back() == []
    assert "drain" in [entry["reason"] for entry in live.of_kind("halted")]
    assert [step["step"] for step in live.steps()] == list(range(1, STEPS + 1))
    audit = run("audit", tmp_path / "runs" / "auto")
    assert audit.returncode == 0, audit.stdout
