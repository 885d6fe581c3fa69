"""README's recipe that goes on with a model: a GPT-2 as transformers saves it, on new text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastrata.cli.main import run
from elastrata.run import history
from elastrata_pipelines.storage import Storage
from support.documented import ROOT
from support.texts import plain_text

SMALL = ["steps=30", "batch_size=8", "optimizer.lr=3e-3", "evaluation.samples=64"]
SPARE_ROWS = 9
"""Rows of the model without an id of its tokenizer, as published models have them."""
ONE_WORKER = ["workers={max: 1, threads: 1, spares: false}", "tracking.uri=sqlite:///mlflow.db"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, ray_local: None) -> Iterator[Path]:
    """The folder of README's reader: a GPT-2 that knows the old texts, and new texts."""
    home = tmp_path_factory.mktemp("home")
    for kind, count in (("old", 40), ("my", 400)):
        (home / kind / "texts").mkdir(parents=True)
        for number in range(count):
            text = plain_text(1 if kind == "my" else 2, 900 + 7 * number)[-900:]
            (home / kind / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        made = "--tokenizer bpe --vocab-size 400 --packing best_fit --seq-len 64 --out data/old"
        assert run(["prepare", "--text", "old/texts", *made.split()]) == 0
        shutil.copytree(home / "data" / "old" / "tokenizer", home / "models" / "theirs")
        _train_with_transformers(home / "old" / "texts", home / "models" / "theirs")
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        (home / "continue.yaml").write_text(
            re.findall(r"```yaml\n(.*?)```", readme, re.S)[1], encoding="utf-8"
        )
        yield home


def _train_with_transformers(texts: Path, folder: Path) -> None:
    """A tiny GPT-2, beside its tokenizer."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"n_positions": 256, "n_embd": 48, "n_layer": 2, "n_head": 2}
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer) + SPARE_ROWS, bos_token_id=end, eos_token_id=end, **sizes
    )
    model: Any = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = [
        tokenizer(path.read_text(encoding="utf-8"))["input_ids"][:128]
        for path in sorted(texts.iterdir())
    ]
    for number in range(30):
        batch = torch.tensor([ids[number % len(ids)]])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


@pytest.mark.matrix
def test_a_gpt2_of_transformers_goes_on_with_new_text(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["prepare", "continue.yaml"]) == 0
    assert run(["train", "continue.yaml", *SMALL, *ONE_WORKER]) == 0
    entries = history.read_entries(Storage("runs/continue").sub("history"))
    losses = {e["step"]: e["eval/loss"] for e in history.surviving_evaluations(entries)}
    assert sorted(losses) == [0, 30]
    assert losses[30] < losses[0] - 0.3
    capsys.readouterr()
    assert run(["audit", "continue", "--json"]) == 0
    parent = json.loads(capsys.readouterr().out)["parent"]
    assert (parent["kind"], parent["url"]) == ("folder", str(home / "models" / "theirs"))
    page = (ROOT / "docs" / "how-to" / "begin-and-fork.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^cd models/theirs && .*", page, re.M)
    told = subprocess.run(line, shell=True, capture_output=True, encoding="utf-8", check=True)
    assert told.stdout.split()[0] == parent["sha256"]
    assert run(["export", "continue", "--out", "models/mine"]) == 0
    config = json.loads((home / "models" / "mine" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["GPT2LMHeadModel"]
    theirs = json.loads((home / "models" / "theirs" / "config.json").read_text(encoding="utf-8"))
    assert config["vocab_size"] == theirs["vocab_size"] == 400 + SPARE_ROWS
    # The same recipe, which does not have the number of rows, continues the run.
    assert run(["train", "continue.yaml", *SMALL, *ONE_WORKER]) == 0
