"""Loss and tokens of every source: in the record of a step, in evaluations, and in pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastrata.run import history
from elastrata.run.entries import step_record
from elastrata.step.records import StepRecord
from elastrata_pipelines.storage import Storage
from support.lone_run import lone_run
from support.synthetic import write_data_set

NAMES = ("web", "code", "rare")
BATCH, STEPS = 21, 8
GPT = {"name": "gpt", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 48}


@pytest.fixture(scope="module", params=["gpt", "bert"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On three sources, the last of which has no sample in most of its steps."""
    folder = tmp_path_factory.mktemp("record")
    for seed, name in enumerate(NAMES):
        write_data_set(folder / "data" / name, samples=200, seed=seed, held_out=20)
    sources = [{"name": "web", "weight": 70}, {"name": "code", "weight": 29}, {"name": "rare"}]
    data = {"path": str(folder / "data"), "sources": sources, "weight_by": "samples"}
    changes: dict[str, Any] = {"workload": GPT} if request.param == "gpt" else {}
    return lone_run(folder, request.param, data=data, steps=STEPS, batch_size=BATCH, **changes)


def steps(run: Path) -> list[StepRecord]:
    entries = history.effective_steps(history.read_entries(Storage(str(run)).sub("history")))
    return [step_record(entry, str(run)) for entry in entries]


def test_tokens_of_the_sources_are_those_of_the_batch(run: Path) -> None:
    for step in steps(run):
        assert sorted(step.batch_tokens_by_source) == sorted(NAMES)
        assert sum(step.batch_tokens_by_source.values()) == step.batch_tokens
        shares = [step.to_metrics()[f"mixture/share/{name}"] for name in NAMES]
        assert sum(shares) == pytest.approx(1)


def test_losses_of_the_sources_are_parts_of_the_loss(run: Path) -> None:
    found = steps(run)
    for step in found:
        present = {name for name in NAMES if step.batch_tokens_by_source[name]}
        told = {name for name in NAMES if f"loss/{name}" in step.metrics}
        assert told == set(step.losses_by_source) <= present
        term = step.terms.get("lm", step.terms.get("mlm", 0.0))
        losses = list(step.losses_by_source.values())
        assert min(losses) <= term * (1 + 1e-6)
        assert max(losses) >= term * (1 - 1e-6)
        assert step.to_metrics()["train/loss/web"] == step.metrics["loss/web"]
    assert any("rare" not in step.losses_by_source for step in found)
    if run.name == "gpt":
        _are_exact_parts(found)


def _are_exact_parts(found: list[StepRecord]) -> None:
    """Where two sources are there: two equations give the share of predictions, which is near that
    of tokens."""
    for step in found:
        losses = step.losses_by_source
        if set(losses) == {"web", "code"} and abs(losses["web"] - losses["code"]) > 1e-3:
            share = (step.loss - losses["code"]) / (losses["web"] - losses["code"])
            tokens = step.batch_tokens_by_source["web"] / step.batch_tokens
            assert share == pytest.approx(tokens, abs=0.1)


def test_evaluations_tell_the_sources_apart(run: Path) -> None:
    entries = history.read_entries(Storage(str(run)).sub("history"))
    evaluated = [entry for entry in entries if entry["kind"] == "evaluated"]
    assert evaluated
    for entry in evaluated:
        losses = [entry[f"eval/loss/{name}"] for name in NAMES]
        assert min(losses) <= entry["eval/loss"] <= max(losses)
