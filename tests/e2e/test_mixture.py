"""A mixture whose shares change: the same samples after a killed driver, at another size."""

from __future__ import annotations

import signal
from pathlib import Path

from elastrata.run import history
from elastrata_pipelines.storage import Storage
from support.command import run_json
from support.live_run import LiveRun, assert_alike
from support.short_steps import write_recipe


def test_three_sources_are_the_same_stream_after_a_kill(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=400, mixed=True, hang_seconds=300)
    run_json("train", recipe, "--name", "alone", "workers.max=1")
    entries = history.read_entries(Storage(str(tmp_path / "runs" / "alone" / "history")))
    undisturbed = list(history.effective_steps(entries))

    often = "checkpoint.every=100"
    live = LiveRun(recipe, "mixed", tmp_path / "log", "workers.max=2", often)
    live.wait_for_checkpoint()
    live.send(signal.SIGKILL)
    live.driver.wait()
    again = LiveRun(recipe, "mixed", tmp_path / "again", "workers.max=1", often)
    again.end()

    started = again.of_kind("started")
    assert [(entry["state"], entry["world_size"]) for entry in started] == [
        ("new", 2),
        ("durable", 1),
    ]
    assert_alike(again, undisturbed)
    assert run_json("audit", tmp_path / "runs" / "mixed")["partition_ok"]
