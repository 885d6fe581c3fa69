"""`begin_with`: the ids of the data set's tokenizer, held against those that the weights know; and
models of the hub."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import Parent
from elastrata.trainer.initial_weights import find_parent
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import FileEntry, Manifest
from elastrata_pipelines.preparation.tokenizer import (
    TokenizerFiles,
    to_files,
    wrap_for_transformers,
)
from elastrata_pipelines.storage import Storage
from support.synthetic import VOCABULARY, tiny_recipe, write_data_set
from support.their_models import WORKLOADS, save_theirs

WORDS = [f"word{number}" for number in range(VOCABULARY)]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _tokenizer(words: Sequence[str]) -> TokenizerFiles:
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])
    return to_files(wrap_for_transformers(tokenizer_object=Tokenizer(model), unk_token=words[0]))


def _data_set(folder: Path, words: Sequence[str]) -> None:
    """A data set as if such a tokenizer had made it."""
    manifest, files, storage = write_data_set(folder, 100), _tokenizer(words), Storage(str(folder))
    entries = list(manifest.files)
    for name, text in files.contents.items():
        path = f"tokenizer/{name}"
        storage.write(text.encode(), path)
        entries.append(FileEntry(path=path, bytes=len(text.encode()), sha256=storage.sha256(path)))
    told = {"files": tuple(entries), "tokenizer_fingerprint": files.fingerprint}
    manifest.model_copy(update=told).write(storage)
    assert Manifest.read(storage).tokenizer_fingerprint == files.fingerprint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_theirs("gpt2", folder)
    for name, text in _tokenizer(WORDS).contents.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def _found(folder: Path, begin_with: str | dict[str, object]) -> tuple[Parent | None, list[str]]:
    values = tiny_recipe(folder / "data", folder / "runs", workload=WORKLOADS["gpt2"])
    recipe, lines = Recipe.model_validate({**values, "begin_with": begin_with}), list[str]()
    run = Storage(str(folder / "runs" / "run"))
    return find_parent(run, recipe, find_training_data(recipe), lines.append), lines


def test_other_ids_are_refused(model: Path, tmp_path: Path) -> None:
    _data_set(tmp_path / "data", [*WORDS[:5], WORDS[6], WORDS[5], *WORDS[7:]])
    with pytest.raises(UserError) as refused:
        _found(tmp_path, str(model))
    (line,) = refused.value.problems
    assert line == (
        f"data.path: {tmp_path / 'data'}: its token ids differ from those of {model}: "
        "'word5' is 6, expected 5 (and 1 more)"
    )


def test_a_folder_without_a_tokenizer_is_believed_and_said(model: Path, tmp_path: Path) -> None:
    _data_set(tmp_path / "data", WORDS)
    shutil.copytree(model, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    _, lines = _found(tmp_path, str(tmp_path / "bare"))
    assert lines == [
        f"begin_with.weights: {tmp_path / 'bare'}: has no tokenizer.json: its token ids are not "
        "checked"
    ]


def test_a_model_of_the_hub_is_taken_from_its_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "cache" / "models--someone--little"
    shutil.copytree(model, cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    _data_set(tmp_path / "data", WORDS)
    parent, lines = _found(tmp_path, "someone/little")
    assert parent is not None
    assert (parent.kind, parent.url, parent.commit) == ("hub", "someone/little", COMMIT)
    assert lines == []
    with pytest.raises(UserError, match="someone/larger: neither a local folder nor a model"):
        _found(tmp_path, "someone/larger")
