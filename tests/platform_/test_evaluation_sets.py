"""Further held-out data sets: evaluated with the run's own, each by itself, and told everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from elastrata.cli.main import run as run_here
from elastrata.recipe.file import load_recipe
from elastrata.run import history
from elastrata.step.records import losses_by_set, losses_by_source
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.storage import Storage
from support.histories import kept_recipe
from support.lone_run import lone_run
from support.synthetic import Sizes, tiny_recipe, write_data_set

SETS = ("python", "prose")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of its sets: one that is its own held-out data once more, and another one."""
    folder = tmp_path_factory.mktemp("sets")
    for seed, name in enumerate(("web", "code")):
        write_data_set(folder / "data" / name, samples=200, seed=seed, held_out=20)
    write_data_set(folder / "prose", samples=70, seed=9)
    sets = [
        {"name": "python", "path": str(folder / "data" / "code" / "held_out")},
        {"name": "prose", "path": str(folder / "prose")},
    ]
    data = {"path": str(folder / "data"), "sources": [{"name": "web"}, {"name": "code"}]}
    evaluation = {"every": 2, "samples": 40, "sets": sets}
    return lone_run(folder, data=data, evaluation=evaluation)


def told(run: Path) -> list[dict[str, Any]]:
    entries = history.read_entries(Storage(str(run)).sub("history"))
    return [dict(entry) for entry in history.surviving_evaluations(entries)]


def test_every_evaluation_tells_the_losses_of_all_sets(run: Path) -> None:
    found = told(run)
    assert [entry["step"] for entry in found] == [2, 4]
    for entry in found:
        assert set(losses_by_set(entry)) == set(SETS)
        assert set(losses_by_source(entry)) == {"web", "code"}
        assert entry["eval/python/mlm_accuracy"] >= 0
        assert len({entry[f"eval/{name}/loss"] for name in SETS}) == 2


def test_the_loss_on_a_set_is_that_of_its_samples_alone(run: Path) -> None:
    """The source's own held-out data as a set: the same samples, by themselves."""
    entry = told(run)[-1]
    assert entry["eval/python/mlm_loss"] == pytest.approx(entry["eval/loss/code"], rel=1e-5)


def test_a_target_may_be_of_a_set(run: Path) -> None:
    values = kept_recipe(run).model_dump(mode="json")
    for metric, is_known in (("eval/prose/loss", True), ("eval/poetry/loss", False)):
        file = run.parent / "target.yaml"
        file.write_text(
            yaml.safe_dump({**values, "target": {"metric": metric, "at_most": 1}}), encoding="utf-8"
        )
        if is_known:
            assert load_recipe(str(file)).target is not None
        else:
            with pytest.raises(UserError, match=r"did you mean 'eval/prose/loss'"):
                load_recipe(str(file))


def problems(
    folder: Path, capsys: pytest.CaptureFixture[str], sets: list[dict[str, Any]], **changes: Any
) -> list[str]:
    """The lines that `elastrata train` refuses a recipe with these sets with."""
    values = {**tiny_recipe(folder / "data", folder / "runs"), "evaluation": {"sets": sets}}
    (folder / "sets.yaml").write_text(yaml.safe_dump({**values, **changes}), encoding="utf-8")
    capsys.readouterr()
    assert run_here(["train", str(folder / "sets.yaml"), "--name", "never"]) == 2
    assert not (folder / "runs" / "never").exists()
    return [line.strip() for line in capsys.readouterr().err.splitlines()]


def test_sets_that_cannot_be_evaluated_are_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data_set(tmp_path / "data", samples=100, held_out=20)
    for name, sizes, pairs in (
        ("other", Sizes(), False),
        ("long", Sizes(seq_len=64), False),
        ("pairs", Sizes(), True),
        ("broken", Sizes(), False),
    ):
        write_data_set(tmp_path / name, samples=30, sizes=sizes, pairs=pairs)
    storage = Storage(str(tmp_path / "other"))
    other = Manifest.read(storage).model_copy(update={"tokenizer_fingerprint": "another"})
    other.write(storage)
    (tmp_path / "broken" / "shards" / "00000.parquet").unlink()
    names = ("other", "long", "pairs", "broken", "missing")
    sets = [{"name": name, "path": str(tmp_path / name)} for name in names]
    lines = problems(tmp_path, capsys, sets)
    for number, text in enumerate(
        (
            "the tokenizer another, expected synthetic, as in the training data",
            "seq_len 64, expected 48",
            "pairs True, expected False",
            "00000.parquet",
            "no data set",
        )
    ):
        (line,) = [line for line in lines if f"evaluation.sets.{number}.path" in line]
        assert text in line


def test_names_that_are_taken_are_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [{"name": name, "path": "x"} for name in ("web", "a", "a", "loss")]
    data = {"path": "data", "sources": [{"name": "web"}]}
    told = " ".join(problems(tmp_path, capsys, sets, data=data))
    for line in (
        "evaluation.sets.0.name: web: already names a source of the data",
        "evaluation.sets.2.name: a: already names sets.1",
        "evaluation.sets.3.name: loss: already names the loss itself",
    ):
        assert line in told
