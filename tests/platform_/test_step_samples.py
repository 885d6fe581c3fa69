"""The samples of a step, on their way back to the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastrata.cli.main import run as run_here
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.format import Manifest, read_stripes
from elastrata_pipelines.preparation import PrepareConfig, prepare
from elastrata_pipelines.preparation.tokenizer import load_tokenizer
from elastrata_pipelines.storage import Storage
from support.lone_run import train_alone
from support.synthetic import tiny_recipe
from support.texts import plain_text

STEP, BATCH, SEQ_LEN = 3, 12, 16


def config(folder: Path, **changes: Any) -> PrepareConfig:
    values = {
        "sources": [
            {"name": "lines", "paths": str(folder / "a.txt"), "documents": "line", "weight": 2},
            {"name": "fields", "paths": str(folder / "b.jsonl")},
        ],
        "tokenizer": {"load": str(folder / "tokenizer")},
        "seq_len": SEQ_LEN,
        "stripe_size": 16,
        "held_out": 0.2,
    }
    return PrepareConfig.model_validate({**values, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ray_local: None) -> Path:
    """A run on two data sets of real text, one packed."""
    folder = tmp_path_factory.mktemp("samples")
    lines = [plain_text(seed, 200) for seed in range(40)]
    (folder / "a.txt").write_text(
        "\n".join(line.replace("\n", " ") for line in lines), encoding="utf-8"
    )
    texts = [json.dumps({"text": plain_text(100 + seed, 300)}) for seed in range(20)]
    (folder / "b.jsonl").write_text("\n".join(texts), encoding="utf-8")
    trained = {"train": "bpe", "vocab_size": 300}
    prepare(config(folder, tokenizer=trained), str(folder / "whole"))
    (folder / "whole" / "tokenizer").rename(folder / "tokenizer")
    for name, packing in (("one", "none"), ("two", "best_fit")):
        prepare(config(folder, packing=packing), str(folder / "mix" / name))
    data = {
        "path": str(folder / "mix"),
        "sources": [{"name": "one", "weight": 2}, {"name": "two"}],
    }
    gpt = {"name": "gpt", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 16}
    recipe = tiny_recipe(folder, folder / "runs", batch_size=BATCH, steps=4)
    recipe = {**recipe, "workload": gpt, "data": data}
    train_alone(Recipe.model_validate(recipe), folder / "runs" / "run")
    return folder


def listed(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    from contextlib import redirect_stdout
    from io import StringIO

    with redirect_stdout(StringIO()) as out:
        command = ["audit", str(folder / "runs" / "run"), "--step", str(STEP), "--samples"]
        assert run_here([*command, *arguments, "--json"]) == 0
    samples: list[dict[str, Any]] = json.loads(out.getvalue().splitlines()[-1])["samples"]
    return samples


def test_every_sample_is_where_it_is_said_to_be(folder: Path) -> None:
    found = listed(folder)
    assert len(found) == BATCH
    assert {Path(one["data_set"]).name for one in found} == {"one", "two"}
    for one in found:
        storage = Storage(one["data_set"])
        manifest = Manifest.read(storage)
        stripe, row = divmod(one["row"], manifest.stripe_size)
        (table,) = read_stripes(storage, manifest, [stripe])
        assert f"{table['sample_id'][row].as_py():016x}" == one["id"]
        assert table["length"][row].as_py() == one["tokens"]
        assert one["origin"] is None


def test_every_sample_is_found_in_the_text(folder: Path) -> None:
    """The document, from that token on, begins with the sample's tokens."""
    found = listed(
        folder, "--text", f"lines={folder / 'a.txt'}", "--text", f"fields={folder / 'b.jsonl'}"
    )
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    prefix = len(tokenizer.frame().prefix)
    for one in found:
        origin = one["origin"]
        raw = Path(origin["file"]).read_text(encoding="utf-8").split("\n")[origin["line"] - 1]
        text = raw if origin["source"] == "lines" else json.loads(raw)["text"]
        storage = Storage(one["data_set"])
        manifest = Manifest.read(storage)
        stripe, row = divmod(one["row"], manifest.stripe_size)
        (table,) = read_stripes(storage, manifest, [stripe])
        stored = memoryview(table["tokens"][row].as_py()).cast("H").tolist()
        own = tokenizer.encode(text)[origin["token"] :][: SEQ_LEN // 2]
        assert (
            stored[prefix:][: min(len(own), one["tokens"])][: SEQ_LEN // 2] == own[: one["tokens"]]
        )
    assert {one["origin"]["copy"] for one in found if one["origin"]["source"] == "fields"} <= {0}


def test_what_is_asked_wrongly_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(folder / "runs" / "run")
    for arguments, line in (
        (["--samples"], "--samples: requires --step K"),
        (["--step", "2"], "--step: requires --samples"),
        (["--step", "99", "--samples"], "--step: 99: not recorded in"),
        (["--step", "2", "--samples", "--text", "missing"], "missing"),
    ):
        assert run_here(["audit", run, *arguments]) == 2
        assert line in capsys.readouterr().err
