"""`elastrata export`: who can read it, which class loads it, and what is told where it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from huggingface_hub import ModelCard

from elastrata.cli.main import run as run_here
from elastrata.run.consistency import choose_commit
from elastrata.run.folder import read_identity
from elastrata.workload.hf_folder import INDEX
from elastrata_pipelines.storage import Storage
from support.documented import documented_keys
from support.lone_run import lone_run
from support.synthetic import MODERNBERT, tiny_recipe

GPT = {"name": "gpt", "hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_positions": 48}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def bert(folder: Path) -> Path:
    return lone_run(folder, "bert")


@pytest.fixture(scope="module")
def gpt(folder: Path) -> Path:
    return lone_run(folder, "gpt", workload=GPT)


@pytest.fixture(scope="module")
def modernbert(folder: Path) -> Path:
    return lone_run(folder, "modernbert", workload=MODERNBERT)


MASKED, CAUSAL = "AutoModelForMaskedLM", "AutoModelForCausalLM"
LOADERS = {"bert": MASKED, "gpt": CAUSAL, "modernbert": MASKED}


@pytest.mark.parametrize("kind", LOADERS)
def test_the_class_that_is_recommended_loads_all_of_it(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["export", str(request.getfixturevalue(kind)), "--out", str(tmp_path / "model")]
    assert run_here([*command, "--json"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert list(result) == documented_keys("export")
    loader = LOADERS[kind]
    assert result["loader"] == loader
    code = shown.err.splitlines()[2].removeprefix("next     ")
    assert code.startswith(f"from transformers import {loader}; {loader}.from_pretrained(")
    found = getattr(transformers, loader).from_pretrained(result["path"], output_loading_info=True)
    assert not any(found[1].values())


def test_an_export_in_bf16_and_shards_is_the_rounded_model(gpt: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_here(["export", str(gpt), "--out", str(whole)]) == 0
    options = ["--dtype", "bf16", "--shard-size", "20KB"]
    assert run_here(["export", str(gpt), "--out", str(cut), *options]) == 0
    files = {path.name for path in cut.glob("*.safetensors")}
    assert len(files) > 1
    assert files == {*json.loads((cut / INDEX).read_text(encoding="utf-8"))["weight_map"].values()}
    model, exact = (
        transformers.AutoModelForCausalLM.from_pretrained(path) for path in (cut, whole)
    )
    assert (model.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(model.state_dict(), exact.bfloat16().state_dict(), rtol=0, atol=0)
    assert "in bfloat16" in (cut / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", LOADERS)
def test_the_card_says_what_the_model_comes_from(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = request.getfixturevalue(kind)
    assert run_here(["export", str(run), "--out", str(tmp_path / "model")]) == 0
    capsys.readouterr()
    assert run_here(["audit", str(run), "--json"]) == 0
    audited = json.loads(capsys.readouterr().out)
    card = ModelCard.load(tmp_path / "model" / "README.md")
    task = {MASKED: "fill-mask", CAUSAL: "text-generation"}[LOADERS[kind]]
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", task)
    assert card.data.tags == ["elastrata", kind]
    commit = choose_commit(Storage(str(run)), "newest")
    told = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert told == commit.evaluation
    assert "eval/loss" in told
    identity = read_identity(Storage(str(run)))
    assert identity is not None
    facts = (audited["digest"], identity.data[0].fingerprint, commit.folder)
    assert all(f"`{fact}`" in card.text for fact in facts)
    assert "4 steps, 84 samples" in card.text
    recipe = yaml.safe_load(card.text.split("```yaml\n")[1].split("```")[0])
    whole = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["workload"] == {k: v for k, v in whole["workload"].items() if k != "attention"}
    assert (recipe["batch_size"], recipe["seed"]) == (whole["batch_size"], whole["seed"])
    assert not {"storage", "workers", "tracking"} & recipe.keys()
    assert str(run.parents[1]) not in card.text


def test_nothing_is_left_of_an_export_that_fails(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = lone_run(folder, "mixed", workload={**GPT, "norm": "rms"})
    assert run_here(["export", str(mixed), "--out", str(tmp_path / "model")]) == 2
    assert "transformers has no such model" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run_here(["export", str(mixed), "--out", str(tmp_path / "empty")]) == 2
    (tmp_path / "file").touch()
    assert run_here(["export", str(mixed), "--out", str(tmp_path / "file" / "model")]) == 2
    assert "/file/model: cannot be written (Not a directory)" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "file"]


@pytest.mark.parametrize("command", ["export", "generate"])
def test_a_workload_that_is_not_installed_is_told(
    command: str, bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for path in bert.iterdir():
        (run / path.name).symlink_to(path)
    for name in ("recipe.yaml", "run.json"):
        (run / name).unlink()
    recipe = tiny_recipe("data", "runs", workload={"name": "lstm", "hidden_size": 32})
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    identity = json.loads((bert / "run.json").read_text(encoding="utf-8"))
    undated = dict.fromkeys(("recipe_sha256", "digest"))
    (run / "run.json").write_text(json.dumps({**identity, **undated}), encoding="utf-8")
    options = {"export": ["--out", str(tmp_path / "out")], "generate": ["--prompt", "a"]}
    assert run_here([command, str(run), *options[command]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{run}/recipe.yaml: workload")
    assert "'lstm': no such workload; installed: bert, gpt" in line


def test_what_is_no_language_model_is_told(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(["generate", str(bert), "--prompt", "a"]) == 2
    told = f"{bert}: workload bert: expected a model that predicts the next token, as gpt does"
    assert capsys.readouterr().err.splitlines() == [told]
    for number, config in enumerate(("{}", '{"model_type": "lstm"}', "[", '{"model_type": 3}')):
        exported = tmp_path / str(number)
        exported.mkdir()
        (exported / "config.json").write_text(config, encoding="utf-8")
        assert run_here(["generate", str(exported), "--prompt", "a"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{exported}: config.json: not a model that transformers supports")
