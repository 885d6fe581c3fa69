"""`elastrata evaluate`: a task of the harness, given to a run's and to an exported model."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from elastrata.cli.main import run as run_here
from elastrata.inference import evaluation as harness
from elastrata.run.folder import read_identity, read_recipe, write_identity
from elastrata.tracking.store import create_client, tracking_uri
from elastrata_pipelines.storage import Storage
from support.documented import documented_keys
from support.empty_store import put_empty_store
from support.lone_run import STEPS
from support.small_gpt import run_with_tokenizer

QUESTIONS = [
    {"question": "Some say the world will end in", "choices": ["fire", "ice"], "answer": number % 2}
    for number in range(8)
]
MEAN = "mean:2"
harness_only = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="the harness is not installed: pip install lm_eval"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it is made of


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_with_tokenizer(tmp_path_factory.mktemp("evaluated"))


@pytest.fixture(scope="module")
def recorded(trained: Path) -> str:
    """The run's id in an MLflow store of its own."""
    put_empty_store(trained.parent)
    run = Storage(str(trained))
    client = create_client(tracking_uri(None, Storage(str(trained.parent))))
    run_id = client.create_run(client.create_experiment("elastrata")).info.run_id
    identity = read_identity(run)
    assert identity is not None
    recorded = identity.model_copy(update={"mlflow_run_id": run_id})
    write_identity(run, recorded, read_recipe(run, identity))
    return str(run_id)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with a task of eight questions, each with two answers."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = "".join(json.dumps(question) + "\n" for question in QUESTIONS)
    (tmp_path / "questions.jsonl").write_text(lines, encoding="utf-8")
    task = {
        "task": "fire_or_ice",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(tmp_path / "questions.jsonl")},
            "cache_dir": str(tmp_path / "cache"),
        },
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "fire_or_ice.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return folder


def _accuracy(folder: Path) -> float:
    """By transformers alone: which answer has the likelier tokens after the question."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    right = 0
    for question in QUESTIONS:
        start = tokenizer(question["question"])["input_ids"]
        chances = []
        for choice in question["choices"]:
            ids = tokenizer(f"{question['question']} {choice}")["input_ids"]
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            places = range(len(start), len(ids))
            chances.append(sum(float(logits[place - 1, ids[place]]) for place in places))
        right += chances.index(max(chances)) == question["answer"]
    return right / len(QUESTIONS)


@pytest.mark.matrix
@harness_only
def test_a_task_of_ones_own_is_told_and_recorded(
    trained: Path, recorded: str, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = tmp_path / "model"
    assert run_here(["export", str(trained), "--out", str(export)]) == 0
    capsys.readouterr()
    options = ["--tasks", "fire_or_ice", "--include", str(tasks), "--json"]
    assert run_here(["evaluate", str(trained), *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == documented_keys("evaluate")
    assert (result["step"], result["recorded"]) == (STEPS, True)
    assert result["samples"] == {"fire_or_ice": len(QUESTIONS)}
    assert result["metrics"]["fire_or_ice/acc"] == _accuracy(export)
    client = create_client(tracking_uri(None, Storage(str(trained.parent))))
    (metric,) = client.get_metric_history(recorded, "harness/fire_or_ice/acc")
    assert (metric.value, metric.step) == (result["metrics"]["fire_or_ice/acc"], STEPS)

    assert run_here(["evaluate", str(export), *options, "--limit", "2"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["step"], again["recorded"], again["samples"]) == (None, False, {"fire_or_ice": 2})

    assert run_here(["export", str(trained), "--out", str(tmp_path / "m"), "--weights", MEAN]) == 0
    capsys.readouterr()
    assert run_here(["evaluate", str(trained), *options, "--weights", MEAN]) == 0
    mean = json.loads(capsys.readouterr().out)["metrics"]["fire_or_ice/acc"]
    assert mean == _accuracy(tmp_path / "m")
    (metric,) = client.get_metric_history(recorded, "harness/mean-2/fire_or_ice/acc")
    assert (metric.value, metric.step) == (mean, STEPS)


@pytest.mark.matrix
@harness_only
def test_what_there_is_not_is_told_in_a_line(
    trained: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", str(trained), "--include", str(tasks), "--tasks"]
    assert run_here([*command, "fire_or_rice"]) == 2
    told = "--tasks: fire_or_rice: no such task (did you mean 'fire_or_ice'?)"
    assert capsys.readouterr().err.splitlines() == [told]
    assert run_here([*command, " , "]) == 2
    assert capsys.readouterr().err.startswith("--tasks: empty: expected names")
    missing = str(tmp_path / "none")
    assert run_here(["evaluate", str(trained), "--tasks", "a", "--include", missing]) == 2
    assert capsys.readouterr().err.splitlines() == [f"--include: {missing}: no such folder"]
    (tmp_path / "questions.jsonl").unlink()
    assert run_here([*command, "fire_or_ice"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--tasks: fire_or_ice: Unable to find")


def test_without_the_harness_one_line_says_what_to_install(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "_PACKAGE", "lm_eval_that_is_not_installed")
    assert run_here(["evaluate", str(trained), "--tasks", "hellaswag"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "evaluate: the Language Model Evaluation Harness is not installed: "
        "pip install 'elastrata[evaluate]', or pip install lm_eval accelerate"
    )
