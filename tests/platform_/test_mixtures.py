"""A run on several sources: shares by phase, resumed and forked without a sample left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from elastrata.cli.main import run as run_here
from elastrata.driver.fork import plan_fork
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.audit import audit
from elastrata.run.folder import read_identity
from elastrata.run.fork import begin_fork
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.mixture import UNITS
from elastrata_pipelines.phase import compute_positions_after
from elastrata_pipelines.storage import Storage
from support.histories import kept_recipe
from support.lone_run import lone_run, train_alone
from support.synthetic import Sizes, tiny_recipe, write_data_set

SAMPLES = {"web": 400, "code": 150, "books": 90}
WEIGHTS = {"web": 5, "code": 3, "books": 2}
STEPS, AT = 24, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With three data sets of different lengths in `mix`."""
    folder = tmp_path_factory.mktemp("mixtures")
    for seed, (name, samples) in enumerate(SAMPLES.items()):
        write_data_set(folder / "mix" / name, samples=samples, seed=seed, held_out=20)
    return folder


def sources(**weights: float | dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, **(said if isinstance(said, dict) else {"weight": said})}
        for name, said in (weights or WEIGHTS).items()
    ]


def data(folder: Path, *, sources: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"path": str(folder / "mix"), "window_stripes": 2, "sources": sources, **more}


PHASES: list[tuple[int, dict[str, float | dict[str, Any]]]] = [
    (9, {"web": 3, "code": 1}),
    (15, {"web": {"weight": 3, "final_weight": 0}, "code": 1, "books": {"weight": 1}}),
]
"""A source comes in the second phase, and another one goes."""


@pytest.fixture(scope="module")
def stem(folder: Path) -> Path:
    """An undisturbed run of two phases."""
    phases = [
        {"steps": steps, "data": data(folder, sources=sources(**weights))}
        for steps, weights in PHASES
    ]
    return lone_run(
        folder, "stem", phases=phases, checkpoint={"every": AT, "keep_last": 9},
        evaluation={"every": AT, "samples": 48}, data=phases[0]["data"],
    )  # fmt: skip


def steps(run: Path) -> list[Any]:
    return list(history.effective_steps(history.read_entries(Storage(str(run)).sub("history"))))


def recipe_of(folder: Path, *, steps: int = 10, **of_data: Any) -> Recipe:
    values = tiny_recipe(folder, folder / "runs", steps=steps)
    return Recipe.model_validate({**values, "data": data(folder, **of_data)})


def test_a_run_is_proven_source_by_source(stem: Path) -> None:
    found = audit(Storage(str(stem)))
    assert (found.problems, found.data.state) == ((), "checked")
    assert found.digests_checked == STEPS
    taken = dict(zip(SAMPLES, found.epochs, strict=True))
    samples = sum(epochs * SAMPLES[name] for name, epochs in taken.items())
    assert samples == pytest.approx(STEPS * 21)
    assert taken["books"] > 0


def test_a_resumed_run_does_the_same_steps(stem: Path, tmp_path: Path) -> None:
    """From the checkpoint in the midst of the second phase on."""
    import shutil

    copy = Path(shutil.copytree(stem, tmp_path / "runs" / "stem"))
    for saved in (copy / "checkpoints").iterdir():
        if f"-{STEPS:09d}-" in saved.name or saved.name.startswith(f"{STEPS:09d}"):
            shutil.rmtree(saved)
    train_alone(kept_recipe(copy), copy)
    told = [(step["step"], step["digest"], step["tokens"]) for step in steps(copy)]
    assert told == [(step["step"], step["digest"], step["tokens"]) for step in steps(stem)]
    assert audit(Storage(str(copy))).partition_ok


def test_a_fork_is_what_the_run_became(stem: Path) -> None:
    plan = plan_fork(f"{stem}@{AT}", "again", ["evaluation.samples=32"])
    begin_fork(plan.fork)
    child = train_alone(plan.fork.recipe, stem.with_name("again"))
    assert [step["digest"] for step in steps(child)] == [
        step["digest"] for step in steps(stem)[AT:]
    ]
    assert audit(Storage(str(child))).problems == ()


def test_a_fork_with_other_weights_reads_on(stem: Path) -> None:
    """No sample comes twice in an epoch of its source, and none is left out."""
    given = ["phases.1.data.sources.2.weight=8", "phases.1.data.sources.0.final_weight=null"]
    plan = plan_fork(f"{stem}@{AT}", "more-books", given)
    begin_fork(plan.fork)
    child = train_alone(plan.fork.recipe, stem.with_name("more-books"))
    found = audit(Storage(str(child)))
    assert (found.problems, found.inherited.state) == ((), "checked")
    assert [s["digest"] for s in steps(child)] != [s["digest"] for s in steps(stem)[AT:]]
    identity = read_identity(Storage(str(child)))
    assert identity is not None
    assert identity.mixtures is not None
    assert identity.mixtures[0]


def test_weights_are_shares_of_tokens(folder: Path) -> None:
    """By default; a source of longer samples gives fewer."""
    by_tokens = find_training_data(recipe_of(folder, sources=sources())).train
    by_samples = find_training_data(recipe_of(folder, sources=sources(), weight_by="samples")).train
    assert by_samples.mixture is not None
    assert by_tokens.mixture is not None
    shares = np.array(by_samples.mixture.legs[0].shares) / UNITS
    assert np.allclose(shares, [0.5, 0.3, 0.2])
    means = np.array([manifest.tokens / manifest.samples for _, manifest in by_tokens.data_sets])
    tokens = np.array(by_tokens.mixture.legs[0].shares) * means
    assert np.allclose(tokens / tokens.sum(), [0.5, 0.3, 0.2])


def test_a_length_in_tokens_is_that_of_the_mixture(folder: Path) -> None:
    values = tiny_recipe(folder, folder / "runs")
    values = {**values, "data": data(folder, sources=sources())}
    values = {**values, "steps": None, "tokens": 20_000}
    phase = find_training_data(Recipe.model_validate(values)).phases[0]
    tokens = phase.steps * 21 * phase.batches.tokens_per_sample
    assert 20_000 <= tokens < 20_000 + 21 * 48


def test_evaluations_have_equally_much_of_every_source(folder: Path) -> None:
    (held_out,) = find_training_data(recipe_of(folder, sources=sources())).held_out
    assert held_out is not None
    assert held_out.samples == 60
    assert held_out.mixture is not None
    assert held_out.mixture.counts(60) == (20, 20, 20)


def problems(folder: Path, tmp_path: Path, capsys: Any, **changes: Any) -> list[str]:
    """The lines that `elastrata train` refuses a recipe with."""
    values = {**tiny_recipe(folder, folder / "runs", steps=10), **changes}
    file = tmp_path / "mixture.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    capsys.readouterr()
    assert run_here(["train", str(file), "--name", "never"]) == 2
    assert not (folder / "runs" / "never").exists()
    return [line.strip() for line in capsys.readouterr().err.splitlines()]


def test_what_the_sources_cannot_be_together_is_told_at_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [{"name": "web", "weight": 0}, {"name": "web", "weight": 0}]
    told = " ".join(
        problems(folder, tmp_path, capsys, data=data(folder, sources=wrong), steps=None, epochs=2)
    )
    for line in (
        "data.sources.0.name: web: 2 sources have it",
        "data.sources: every weight is 0, of web",
        "epochs: 2.0: expected steps or tokens",
    ):
        assert line in told


def test_sources_that_do_not_go_together_are_told_at_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the numbers: another tokenizer, another length, too few samples, too many epochs."""
    mix = tmp_path / "mix"
    for name, samples, seq_len in (("one", 300, 48), ("two", 300, 48), ("long", 300, 64)):
        write_data_set(mix / name, samples=samples, sizes=Sizes(seq_len=seq_len))
    write_data_set(mix / "few", samples=3)
    storage = Storage(str(mix / "two"))
    manifest = Manifest.read(storage).model_copy(update={"tokenizer_fingerprint": "another"})
    manifest.write(storage)
    write_data_set(mix / "copy", samples=300)
    given = sources(one=1, two=1, long=1, few=2, copy=1)
    told = problems(
        folder, tmp_path, capsys, data={"path": str(mix), "sources": given}, batch_size=20
    )
    expected = (
        "data.sources.1.path: " + f"{mix}/two: the tokenizer another, expected synthetic",
        "data.sources.2.path: " + f"{mix}/long: seq_len 64, expected 48",
        "data.sources.3.weight: 2: a batch of 20 takes",
        "data.sources.4.path: " + f"{mix}/copy: the same data set as {mix}/one",
    )
    for line in expected:
        assert any(line in one for one in told), (line, told)


def test_too_many_epochs_are_told_with_the_numbers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = sources(web=5, code=3, books={"weight": 2, "max_epochs": 1.5})
    (line, *_) = [
        line
        for line in problems(
            folder, tmp_path, capsys, steps=100,
            data=data(folder, sources=given, weight_by="samples"),
        )
        if "max_epochs" in line
    ]  # fmt: skip
    assert "data.sources.2.max_epochs: 1.5: 420 samples of books are taken" in line
    assert "of 90: expected at least 4.67" in line


def test_an_exhausted_source_gives_its_share_to_the_others(folder: Path) -> None:
    given = sources(web=5, code=3, books={"weight": 2, "max_epochs": 1.5})
    recipe = recipe_of(
        folder, steps=100, sources=given, weight_by="samples", when_exhausted="redistribute"
    )
    found = find_training_data(recipe)
    sizes = [phase.size for phase in found.phases]
    taken = compute_positions_after(100, sizes, [list(SAMPLES)])
    assert taken["books"] == 135
    assert sum(taken.values()) == 2100
    assert abs(taken["web"] / taken["code"] - 5 / 3) < 0.02
    assert found.mixtures is not None
    assert len(found.mixtures[0]) == 2
