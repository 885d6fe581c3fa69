"""`prepare` of a mixture: a data set for each source, with one tokenizer, trained on all text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastrata.recipe.data_sets import preparations
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import HELD_OUT, Manifest
from elastrata_pipelines.preparation import PrepareConfig, prepare
from elastrata_pipelines.preparation.corpus import Corpus
from elastrata_pipelines.storage import Storage
from support.synthetic import tiny_recipe
from support.texts import plain_text


def recipe(folder: Path, **of_data: Any) -> Recipe:
    text = [{"name": name, "paths": str(folder / f"{name}.txt")} for name in ("web", "code")]
    prepared = {
        "sources": [{**one, "documents": "line"} for one in text],
        "tokenizer": {"train": "bpe", "vocab_size": 300},
        "seq_len": 16,
        "held_out": 0.2,
        "stripe_size": 32,
    }
    sources = [{"name": "web", "weight": 3}, {"name": "code"}]
    data = {"path": str(folder / "mix"), "sources": sources, "prepare": prepared, **of_data}
    gpt = {"name": "gpt", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_positions": 16}
    return Recipe.model_validate(
        {**tiny_recipe(folder, folder / "runs"), "data": data, "workload": gpt}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(("web", "code")):
        lines = [plain_text(seed * 100 + n, 200).replace("\n", " ") for n in range(40)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def test_each_source_becomes_a_data_set(folder: Path, ray_local: None) -> None:
    mixed = recipe(folder)
    for path, config in preparations(mixed).items():
        prepare(config, path)
    found = find_training_data(mixed)
    assert [Path(url).name for url, _ in found.trained_on] == ["web", "code"]
    manifests = [manifest for _, manifest in found.trained_on]
    assert len({manifest.tokenizer_fingerprint for manifest in manifests}) == 1
    assert [source.name for manifest in manifests for source in manifest.sources] == ["web", "code"]
    (held_out,) = found.held_out
    assert held_out is not None
    assert [source.name for source in held_out.sources] == ["web", "code"]
    assert Manifest.read(Storage(str(folder / "mix" / "code" / HELD_OUT))).samples


def fingerprint(config: PrepareConfig) -> str:
    return Corpus.find(config, lambda *_: None).fingerprint(None)


def test_other_text_of_the_tokenizer_is_another_data_set(folder: Path) -> None:
    first, _ = preparations(recipe(folder)).values()
    before = fingerprint(first)
    (folder / "code.txt").write_text("something else", encoding="utf-8")
    assert fingerprint(first) != before
    alone = first.model_copy(
        update={"tokenizer": first.tokenizer.model_copy(update={"sources": ()})}
    )
    assert fingerprint(alone) != before


def test_names_that_do_not_agree_are_told_at_once(folder: Path) -> None:
    sources = [{"name": "wep"}, {"name": "code"}]
    with pytest.raises(UserError) as error:
        preparations(recipe(folder, sources=sources))
    assert error.value.problems == (
        "data.sources.0.name: wep: not among the sources of data.prepare, web, code "
        "(did you mean 'web'?)",
        "data.prepare.sources: web: not among data.sources, wep, code (did you mean 'wep'?)",
    )
