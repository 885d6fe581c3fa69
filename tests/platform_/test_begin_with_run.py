"""`begin_with` another run: its weights, in any layout, and whatever does not fit them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from elastrata.checkpoints.commit import list_commits
from elastrata.checkpoints.state import (
    MODEL,
    OPTIMIZER,
    ModelTensors,
)
from elastrata.cli.main import run as run_here
from elastrata.parallel.mesh import lone_group
from elastrata.recipe.file import load_recipe, to_yaml
from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import read_identity, read_resumed_recipe
from elastrata.sweeps.trial import LoneTrial
from elastrata.trainer.initial_weights import find_parent
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.storage import Storage
from support.begin_ranks import Begun, first_losses, optimizer_states
from support.lone_run import lone_run
from support.ranks import run_fresh_ranks, run_ranks
from support.synthetic import MODERNBERT, VOCABULARY, tiny_recipe
from support.their_models import WORKLOADS, save_theirs

BERT = {"name": "bert", "hidden_size": 32, "num_layers": 2, "num_heads": 2}
GPT = {"name": "gpt", "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_positions": 48}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("begin")


@pytest.fixture(scope="module")
def parent(folder: Path) -> Path:
    return lone_run(folder, "parent", workload=GPT)


def _recipe(folder: Path, begin_with: Any, **changes: Any) -> dict[str, Any]:
    evaluation = {"every": 2, "samples": 32}
    values = tiny_recipe(folder / "data", folder / "runs", evaluation=evaluation, workload=GPT)
    return {**values, "begin_with": begin_with, **changes}


def _begun(folder: Path, begin_with: Any, **changes: Any) -> Begun:
    recipe = Recipe.model_validate(_recipe(folder, begin_with, **changes))
    with lone_group(torch.device("cpu")):
        return Begun(0, 1, recipe, folder / "runs" / "child")


def _evaluations(run: Path) -> dict[int, float]:
    lines = [
        json.loads(line)
        for path in sorted((run / "history").glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return {line["step"]: line["eval/loss"] for line in lines if line["kind"] == "evaluated"}


@pytest.mark.parametrize(("chosen", "step"), [("", 4), ("@2", 2), ("@newest", 4)])
def test_a_run_begins_with_the_checkpoint_that_is_named(
    folder: Path, parent: Path, chosen: str, step: int
) -> None:
    begun = _begun(folder, f"{parent}{chosen}")
    (commit,) = (c for c in list_commits(Storage(str(parent)).sub("checkpoints")) if c.step == step)
    expected = dict(ModelTensors(Storage(str(parent)).sub("checkpoints"), commit))
    found = begun.weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert begun.parent is not None
    assert (begun.parent.step, begun.parent.commit) == (step, commit.folder)


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, {}),
        (3, {}),
        (2, {"tensor": 2}),
        (2, {"pipeline": 2}),
        pytest.param(4, {"tensor": 2}, marks=pytest.mark.matrix),
        pytest.param(4, {"replicate": 2}, marks=pytest.mark.matrix),
        pytest.param(4, {"pipeline": 2, "tensor": 2}, marks=pytest.mark.matrix),
    ],
)
def test_the_first_loss_is_the_parents_last_in_any_layout(
    folder: Path, parent: Path, world_size: int, parallel: dict[str, Any]
) -> None:
    count = {"min": world_size, "max": world_size, "cpus": 0.4, "threads": 1, "spares": False}
    recipe = _recipe(folder, f"{parent}@4", parallel=parallel, workers=count)
    run = run_fresh_ranks if parallel else run_ranks
    found = run(world_size, first_losses, [(recipe, str(folder / "runs" / "child"))])
    expected = _evaluations(parent)[4]
    assert [losses[0] for losses in found] == pytest.approx([expected] * world_size, rel=1e-6)


def test_the_state_of_the_optimizer_comes_along_where_it_is_asked_for(
    folder: Path, parent: Path
) -> None:
    begun = _begun(folder, {"weights": f"{parent}@2", "optimizer": True})
    moments = begun.trainer.state()["optimizer"]
    steps = {float(value) for name, value in moments.items() if name.endswith(".step")}
    assert steps == {2.0}
    assert "optimizer" not in _begun(folder, f"{parent}@2").trainer.state()


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, {"pipeline": 2}),
        pytest.param(3, {}, marks=pytest.mark.matrix),
        pytest.param(2, {"tensor": 2}, marks=pytest.mark.matrix),
        pytest.param(4, {"pipeline": 2, "tensor": 2}, marks=pytest.mark.matrix),
        pytest.param(4, {"replicate": 2}, marks=pytest.mark.matrix),
    ],
)
def test_and_so_it_does_in_any_layout(
    folder: Path, parent: Path, world_size: int, parallel: dict[str, Any]
) -> None:
    count = {"min": world_size, "max": world_size, "cpus": 0.4, "threads": 1, "spares": False}
    begin = {"weights": f"{parent}@2", "optimizer": True}
    recipe = _recipe(folder, begin, parallel=parallel, workers=count)
    run = run_fresh_ranks if parallel else run_ranks
    found = run(world_size, optimizer_states, recipe, str(folder / "runs" / "child"))
    storage = Storage(str(parent)).sub("checkpoints")
    (commit,) = (c for c in list_commits(storage) if c.step == 2)
    for number, part in enumerate((MODEL, OPTIMIZER)):
        expected = dict(ModelTensors(storage, commit, part))
        assert {name for states in found for name in states[number]} == expected.keys()
        for states in found:
            for name, value in states[number].items():
                assert torch.equal(value, expected[name]), name


def _refused(folder: Path, begin_with: Any, **changes: Any) -> tuple[str, ...]:
    with pytest.raises(UserError) as refused:
        _begun(folder, begin_with, **changes)
    assert not (folder / "runs" / "child").exists()
    return refused.value.problems


def test_a_step_without_a_checkpoint_is_refused_with_the_nearest(
    folder: Path, parent: Path
) -> None:
    (line,) = _refused(folder, f"{parent}@3000")
    assert line.startswith("begin_with.weights: 3000: expected newest, best or one of the steps 2")
    assert line.endswith("(did you mean '4'?)")


def test_all_that_is_wrong_is_told_at_once(
    folder: Path, parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder / "other-data"
    shutil.copytree(folder / "data", other)
    told: dict[str, object] = {"tokenizer_fingerprint": "another"}
    for storage in (Storage(str(other / "held_out")), Storage(str(other))):
        manifest = Manifest.read(storage).model_copy(update=told)
        manifest.write(storage)
        told["held_out"] = manifest.fingerprint
    begin = {"weights": f"{parent}@3000", "optimizer": True}
    changed = {"workload": {**GPT, "norm": "rms"}, "data": {"path": str(other)}}
    step, norm, tokenizer = _refused(folder, begin, **changed)
    absent = "begin_with.weights: 3000: expected newest, best or one of the steps 2, 4"
    assert step.startswith(absent)
    assert norm == f"workload.norm: rms: expected layer, as {parent} has"
    assert tokenizer.startswith(f"data.path: {other}: its token ids differ from those of ")
    # Also if the data set cannot be used at all.
    path = folder / "absent.yaml"
    recipe = Recipe.model_validate(_recipe(folder, begin, data={"path": str(folder / "no-data")}))
    path.write_text(to_yaml(recipe), encoding="utf-8")
    assert run_here(["train", str(path), "--name", "absent"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "no-data: no data set here (manifest.json" in line]
    assert [line for line in lines if absent in line]


def test_a_part_of_a_run_or_of_a_model_names_the_whole(
    folder: Path, parent: Path, tmp_path: Path
) -> None:
    (newest, *_) = sorted((parent / "checkpoints").glob("000000004-*"))
    (line,) = _refused(folder, str(newest))
    assert line == (f"begin_with.weights: {newest}: a checkpoint, expected its run, {parent}@4")
    for file in (parent / "run.json", tmp_path / "config.json", tmp_path / "model.safetensors"):
        file.touch()
        (line,) = _refused(folder, str(file))
        assert line == (
            f"begin_with.weights: {file}: a file, expected the folder that it is in, {file.parent}"
        )


def test_a_checkpoint_that_does_not_verify_is_refused(folder: Path, parent: Path) -> None:
    damaged = lone_run(folder, "damaged", workload=GPT)
    (file, *_) = sorted((damaged / "checkpoints").glob("000000004-*/*.distcp"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (line,) = _refused(folder, f"{damaged}@4")
    assert line.startswith("begin_with.weights: checkpoint ")
    assert f"{file.name} is altered" in line


def test_another_model_is_refused_key_by_key(folder: Path, parent: Path) -> None:
    changed = {**GPT, "num_layers": 3, "num_heads": 4, "norm": "rms"}
    lines = _refused(folder, str(parent), workload=changed)
    where = f"as {parent}, step 4 has"
    assert f"workload.num_layers: 3: expected 2, {where}" in lines
    assert f"workload.num_heads: 4: expected 2, {where}" in lines
    assert f"workload.norm: rms: expected layer, {where}" in lines
    (line,) = _refused(folder, str(parent), workload=BERT)
    assert line == f"workload.name: bert: expected gpt, {where}"


@pytest.fixture(scope="module")
def modern(folder: Path) -> Path:
    return lone_run(folder, "modern", workload=MODERNBERT)


def test_keys_that_may_differ_do(folder: Path, modern: Path) -> None:
    """Another rotary base for longer samples: the same weights, the same moments, another model."""
    longer = {**MODERNBERT, "global_rotary_base": 9e5, "max_positions": 96}
    where = f"as {modern}, step 4 has"
    (line,) = _refused(folder, str(modern), workload=longer)
    assert line == f"workload.global_rotary_base: 900000.0: expected 160000.0, {where}"

    begin = {"weights": str(modern), "optimizer": True, "may_differ": ["global_rotary_base"]}
    same = _begun(folder, str(modern), workload=MODERNBERT)
    other = _begun(folder, begin, workload=longer)
    expected, found = same.weights(), other.weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    moments = other.trainer.state()["optimizer"]
    assert {float(v) for name, v in moments.items() if name.endswith(".step")} == {4.0}
    assert other.trainer.model.shape.global_rotary_base == 9e5
    with lone_group(torch.device("cpu")):
        assert same.loss() == pytest.approx(_evaluations(modern)[4], rel=1e-6)


def test_another_optimizer_cannot_take_its_state(folder: Path, parent: Path) -> None:
    begin = {"weights": str(parent), "optimizer": True}
    (line,) = _refused(folder, begin, optimizer={"name": "lamb", "lr": 1e-3})
    assert line.startswith("begin_with.optimizer: true: the run was trained with adamw")


def _trial(folder: Path, name: str, begin_with: str) -> LoneTrial:
    recipe = _recipe(folder, begin_with, steps=4, checkpoint={"every": 1000})
    run = Storage(str(folder / "runs" / name))
    return LoneTrial(Recipe.model_validate(recipe), run)


def test_until_its_first_checkpoint_a_run_begins_anew_with_the_same_weights(folder: Path) -> None:
    source = lone_run(folder, "source", workload=GPT)
    threads = torch.get_num_threads()
    with lone_group(torch.device("cpu")):
        lost = _trial(folder, "begun-twice", str(source))
        first, step = lost.evaluation(), lost.report()
        lost.close()
        (newest, *_) = sorted((source / "checkpoints").glob("000000004-*"))
        again = _trial(folder, "begun-twice", str(source))
        assert again.start.step == 0
        assert again.evaluation() == first
        assert again.report().metrics == step.metrics
        again.close()
        shutil.rmtree(newest)
        with pytest.raises(UserError, match=r"begin_with\.weights: "):
            _trial(folder, "begun-twice", str(source))
    torch.set_num_threads(threads)


def test_a_run_with_a_checkpoint_needs_its_parent_no_more(folder: Path) -> None:
    source = lone_run(folder, "gone", workload=GPT)
    child = lone_run(folder, "orphan", workload=GPT, begin_with=str(source))
    before = read_identity(Storage(str(child)))
    assert before is not None
    shutil.rmtree(source)
    recipe = Recipe.model_validate(_recipe(folder, str(source)))
    found = find_parent(Storage(str(child)), recipe, find_training_data(recipe), pytest.fail)
    assert found == before.parent


def test_a_run_in_a_bucket_is_begun_with(folder: Path, parent: Path, bucket: str) -> None:
    _upload(parent, f"{bucket}/runs/parent")
    here, there = _begun(folder, f"{parent}@2"), _begun(folder, f"{bucket}/runs/parent@2")
    expected, found = here.weights(), there.weights()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert here.parent is not None
    assert there.parent == here.parent.model_copy(update={"url": f"{bucket}/runs/parent"})
    (line,) = _refused(folder, f"{bucket}/runs/parent@3")
    assert line.startswith("begin_with.weights: 3: expected newest, best or one of the steps 2")


def test_a_model_in_a_bucket_is_begun_with(
    folder: Path, parent: Path, bucket: str, tmp_path: Path
) -> None:
    command = ["export", str(parent), "--out", str(tmp_path / "model"), "--shard-size", "20KB"]
    assert run_here(command) == 0
    _upload(tmp_path / "model", f"{bucket}/model")
    here, there = _begun(folder, str(tmp_path / "model")), _begun(folder, f"{bucket}/model")
    expected, found = here.weights(), there.weights()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert here.parent is not None
    assert there.parent == here.parent.model_copy(update={"url": f"{bucket}/model"})
    _, second, *_ = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    Storage(bucket).write(b"", "model", second)
    (line,) = _refused(folder, f"{bucket}/model")
    assert line.startswith(f"begin_with.weights: {bucket}/model/{second}: truncated")


def _upload(folder: Path, url: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            Storage(url).write(path.read_bytes(), *path.relative_to(folder).parts)


def test_a_recipe_that_names_no_model_has_the_runs(folder: Path, parent: Path) -> None:
    values = _recipe(folder, str(parent))
    del values["workload"]
    (folder / "on.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    assert load_recipe(str(folder / "on.yaml")).workload.model_dump()["hidden_size"] == 32
    (folder / "on.yaml").write_text(
        yaml.safe_dump({**values, "begin_with": "runs/none"}), encoding="utf-8"
    )
    with pytest.raises(UserError, match=r"on\.yaml: begin_with\.weights: runs/none: "):
        load_recipe(str(folder / "on.yaml"))


def test_rows_without_an_id_are_kept_from_run_to_run(
    folder: Path, parent: Path, tmp_path: Path
) -> None:
    gpt2 = WORKLOADS["gpt2"]
    save_theirs("gpt2", tmp_path / "padded", num_ids=VOCABULARY + 7)
    first = lone_run(folder, "padded", workload=gpt2, begin_with=str(tmp_path / "padded"))
    assert read_resumed_recipe(Storage(str(first))).workload.vocab_size == VOCABULARY + 7
    # The recipe that began the run continues it, although it does not have the number of rows.
    assert lone_run(folder, "padded", workload=gpt2, begin_with=str(tmp_path / "padded")) == first
    begun = _begun(folder, str(first), workload=gpt2)
    assert begun.recipe.workload.vocab_size == VOCABULARY + 7
    assert begun.weights()["embeddings.tokens.weight"].shape[0] == VOCABULARY + 7
    with lone_group(torch.device("cpu")):
        assert begun.loss() == pytest.approx(_evaluations(first)[4], rel=1e-6)


def test_weights_that_are_no_numbers_are_named(folder: Path) -> None:
    """A learning rate that is too large has made them so, of a run before."""
    wild = lone_run(
        folder,
        "wild",
        workload=GPT,
        on_nonfinite="skip",
        optimizer={"name": "adamw", "lr": 1e38, "weight_decay": 0},
    )
    for begin in (str(wild), {"weights": str(wild), "optimizer": True}):
        with pytest.raises(
            UserError, match=r"wild/checkpoints/.*: .*weight: contains NaN or infinity"
        ):
            _begun(folder, begin)
