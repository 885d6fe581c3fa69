"""Alternatives: what a later choice leaves of an earlier one's keys, wherever recipes merge."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError

BASE = """\
workload: {name: bert, hidden_size: 32, num_layers: 1, num_heads: 2, next_sentence: true}
data:
  path: data
  prepare:
    sources: [{paths: text}]
    tokenizer: {train: wordpiece, vocab_size: 400, lowercase: true}
    seq_len: 32
steps: 10
batch_size: 8
optimizer: {name: lamb, lr: 1e-3, eps: 1e-7, trust_max: 2}
schedule: {shape: polynomial, power: 0.5, warmup_steps: 2}
sparsity: {method: rigl, level: 0.5, until: 0.6}
clip: {method: bucketwise, scope: reduced}
evaluation: {every: 5}
target: {metric: eval/loss, at_most: 2.0}
"""
CHOICES = {
    "tokenizer": ("data.prepare.tokenizer", "load", "some/folder"),
    "tokenizer's kind": ("data.prepare.tokenizer", "train", "bpe"),
    "optimizer": ("optimizer", "name", "muon"),
    "schedule": ("schedule", "shape", "linear"),
    "sparsity": ("sparsity", "method", "static"),
    "clip": ("clip", "method", "global_norm"),
    "evaluation": ("evaluation", "every_samples", 100),
    "target": ("target", "at_least", 0.5),
    "workload": ("workload", "name", "gpt"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE, encoding="utf-8")
    return tmp_path


def _holds(recipe: Recipe, choice: str) -> None:
    """That the choice was made, and that what both alternatives have is there."""
    section, key, value = CHOICES[choice]
    found = recipe.model_dump()
    for name in section.split("."):
        found = found[name]
    assert found[key] == value
    assert recipe.optimizer.eps == 1e-7
    assert recipe.schedule.warmup_steps == 2
    assert recipe.workload.model_dump()["hidden_size"] == 32


def _without_sparsity(choice: str) -> list[str]:
    """Bucketwise clipping and RigL go together; the target is one of BERT's and GPT's."""
    return [] if choice == "sparsity" else ["sparsity=null"]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_recipe_that_extends_another_chooses_anew(folder: Path, choice: str) -> None:
    section, key, value = CHOICES[choice]
    text = f"{key}: {value}"
    for name in reversed(section.split(".")):
        text = f"{name}: {{{text}}}"
    (folder / "top.yaml").write_text(f"extends: base.yaml\n{text}\n", encoding="utf-8")
    _holds(load_recipe("top.yaml", _without_sparsity(choice)), choice)


@pytest.mark.parametrize("choice", CHOICES)
def test_the_command_line_chooses_anew(folder: Path, choice: str) -> None:
    section, key, value = CHOICES[choice]
    _holds(
        load_recipe("base.yaml", [f"{section}.{key}={value}", *_without_sparsity(choice)]), choice
    )


def test_what_one_place_says_twice_is_a_mistake_of_that_place(folder: Path) -> None:
    (folder / "top.yaml").write_text(
        "extends: base.yaml\ndata: {prepare: {tokenizer: {load: a, train: bpe}}}\n",
        encoding="utf-8",
    )
    for name, overrides in (
        ("top.yaml", []),
        ("base.yaml", ["data.prepare.tokenizer.load=a", "data.prepare.tokenizer.train=bpe"]),
        ("base.yaml", ["data.prepare.tokenizer.train=bpe", "data.prepare.tokenizer.load=a"]),
    ):
        with pytest.raises(UserError) as caught:
            load_recipe(name, overrides)
        (line,) = caught.value.problems
        assert "data.prepare.tokenizer: needs either load" in line
