"""Exports in the hands of others: served, and fine-tuned as docs/how-to/export.md shows."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, pipeline

from elastrata.cli.main import run as run_here
from elastrata.inference.language_model import Sampling, continue_text, load_language_model
from support.documented import ROOT
from support.small_gpt import GPT, run_with_tokenizer
from support.synthetic import MODERNBERT

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and vLLM
LLAMA = {
    "positions": "rotary",
    "activation": "swiglu",
    "norm": "rms",
    "bias": False,
    "num_kv_heads": 1,
    "tied_embeddings": False,
}
STYLES = {"gpt2": {}, "llama": LLAMA, "qwen3": {**LLAMA, "qk_norm": True, "z_loss": 1e-4}}
BERT = {"name": "bert", "hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_positions": 48}
PROMPT, TOKENS = "Some say the world will end in", 8


@pytest.fixture(scope="module", params=STYLES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export in several files, trained through the engine."""
    folder = tmp_path_factory.mktemp(request.param)
    run = run_with_tokenizer(folder, workload={**GPT, **STYLES[request.param]})
    command = ["export", str(run), "--out", str(folder / "model"), "--shard-size", "20KB"]
    assert run_here(command) == 0
    return folder / "model"


def _greedy(model: Path) -> str:
    loaded = load_language_model(str(model))
    said = continue_text(loaded, PROMPT, tokens=TOKENS, sampling=Sampling(temperature=0))
    return said.text


def test_transformers_serves_the_export(served: Path) -> None:
    write = pipeline("text-generation", model=str(served), device="cpu")
    (said,) = write(PROMPT, max_new_tokens=TOKENS, do_sample=False, return_full_text=False)
    assert said["generated_text"] == _greedy(served)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_serves_the_export(served: Path) -> None:
    import vllm

    model = vllm.LLM(str(served), dtype="float32", enforce_eager=True)
    (said,) = model.generate([PROMPT], vllm.SamplingParams(temperature=0, max_tokens=TOKENS))
    assert said.outputs[0].text == _greedy(served)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="the Trainer needs accelerate")
@pytest.mark.parametrize(
    ("workload", "kind"),
    [(BERT, "Bert"), (MODERNBERT, "ModernBert")],
    ids=["bert", "modernbert"],
)
def test_a_classifier_is_made_of_a_bert_as_the_docs_show(
    workload: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_tokenizer(tmp_path, "wordpiece", workload=workload)
    monkeypatch.chdir(tmp_path)
    assert run_here(["export", str(run), "--out", "models/first"]) == 0
    page = (ROOT / "docs" / "how-to" / "export.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page.split("## A classifier")[1], re.DOTALL)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(code, names)
    assert 0.3 < names["before"]["eval_accuracy"] < 0.7
    assert names["after"]["eval_accuracy"] > 0.95
    tuned = AutoModelForSequenceClassification.from_pretrained("models/classifier")
    assert type(tuned).__name__ == f"{kind}ForSequenceClassification"
