"""Tokenizers: trained alike every time, framed by their own rules, loaded by transformers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from functools import lru_cache
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.preparation.config import TokenizerConfig
from elastrata_pipelines.preparation.encoders import make_encoder
from elastrata_pipelines.preparation.packing import Frame
from elastrata_pipelines.preparation.pairs import PairFrame
from elastrata_pipelines.preparation.tokenizer import TokenizerFiles, load_tokenizer
from elastrata_pipelines.preparation.training import train_tokenizer

SCRIPT = """
import sys
from support.texts import tricky_texts
from elastrata_pipelines.preparation.config import TokenizerConfig
from elastrata_pipelines.preparation.training import train_tokenizer
config = TokenizerConfig(train=sys.argv[1], vocab_size=900)
print(train_tokenizer(tricky_texts(), config, seq_len=64).fingerprint)
"""


@lru_cache
def trained(kind: str) -> TokenizerFiles:
    from support.texts import tricky_texts

    config = TokenizerConfig.model_validate({"train": kind, "vocab_size": 900})
    return train_tokenizer(tricky_texts(), config, seq_len=64)


def save(files: TokenizerFiles, folder: Path) -> None:
    for name, text in files.contents.items():
        (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_two_trainings_in_two_processes_are_equal(kind: str) -> None:
    root = Path(__file__).parents[1]
    printed = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT, kind],
            cwd=root,
            check=True,
            capture_output=True,
            encoding="utf-8",
        ).stdout
        for _ in range(2)
    ]
    assert printed[0] == printed[1]


DATA_SET = """
import sys
from elastrata_pipelines.preparation import PrepareConfig
from elastrata_pipelines.preparation.corpus import Corpus
from elastrata_pipelines.preparation.portions import Group, ReadWork
from elastrata_pipelines.preparation.tokenizer import load_tokenizer
from elastrata_pipelines.preparation.training import train_tokenizer
from elastrata_pipelines.preparation.work import ChooseTrainingText

source = {"name": "s", "paths": [sys.argv[1]], "documents": "line"}
values = {"sources": [source], "tokenizer": {"train": "bpe", "vocab_size": 400}, "seq_len": 32}
config = PrepareConfig.model_validate(values)
corpus = Corpus.find(config, lambda *_: None)
portions = ReadWork(config, 2**20)(Group(0, corpus.files))
chosen = [one for portion in portions for one in ChooseTrainingText(config, 1.0)(portion).chosen]
trained = train_tokenizer([text for _, text in chosen], config.tokenizer, seq_len=32)
with open(f"{sys.argv[2]}/tokenizer.json", "wb") as stream:
    stream.write(trained.tokenizer_json.encode())
loaded = load_tokenizer(f"{sys.argv[2]}/tokenizer.json")
print(ascii(chosen), trained.fingerprint, loaded.fingerprint, corpus.fingerprint(loaded))
"""


def test_the_machines_encoding_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text, file names, ids of documents, tokenizer and fingerprint are those of UTF-8."""
    texts, saved = tmp_path / "texts", tmp_path / "tokenizer"
    texts.mkdir()
    saved.mkdir()
    for name, text in (("größe.txt", "Straße naïve ½\n中文 한국어 🙂"), ("数.txt", "é ß")):
        (texts / name).write_text(text, encoding="utf-8")
    (texts / "a.txt").write_text("plain\nspaces and letters", encoding="utf-8")
    expected = StringIO()
    monkeypatch.setattr(sys, "argv", ["", str(texts), str(saved)])
    with redirect_stdout(expected):
        exec(DATA_SET, {})
    assert "\\u4e2d" in expected.getvalue()
    found = subprocess.run(
        [sys.executable, "-c", DATA_SET, str(texts), str(saved)],
        env={**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", **_latin_1(tmp_path)},
        stdout=subprocess.PIPE,
        encoding="ascii",
    )
    assert found.stdout == expected.getvalue()


def _latin_1(folder: Path) -> dict[str, str]:
    """Variables that set a locale of ISO-8859-1 or, on machines that cannot make one, of ASCII."""
    name = "de_DE.ISO-8859-1"
    command = ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", str(folder / name)]
    if shutil.which("localedef") and subprocess.run(command, capture_output=True).returncode < 2:
        return {"LC_ALL": name, "LOCPATH": str(folder)}
    return {"LC_ALL": "C"}


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_transformers_loads_what_was_saved(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    files = trained(kind)
    save(files, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    vocabulary = files.vocabulary()
    assert loaded.pad_token_id == vocabulary.pad_id
    assert loaded.mask_token_id == vocabulary.mask_id
    assert len(loaded) == vocabulary.size <= 900
    assert set(loaded.all_special_ids) == set(vocabulary.special_ids)
    assert load_tokenizer(str(tmp_path)).fingerprint == files.fingerprint


@pytest.mark.parametrize(
    ("kind", "name"), [("wordpiece", "tokenizers with a word cache"), ("bpe", "tiktoken")]
)
def test_the_fast_encoders_give_the_ids_of_transformers(
    kind: str, name: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    from support.texts import tricky_texts

    files = trained(kind)
    save(files, tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    texts = tricky_texts()
    tokens, lengths, used = make_encoder(files.tokenizer_json).encode(texts)
    assert used == name
    for text, ids in zip(texts, np.split(tokens, np.cumsum(lengths)[:-1]), strict=True):
        assert ids.tolist() == reference.encode(text, add_special_tokens=False), text


def test_more_white_space_than_the_fast_encoder_bears() -> None:
    files = trained("bpe")
    texts = ["a" + " " * 1_000_000 + "b", "a b"]
    encoder = make_encoder(files.tokenizer_json)
    tokens, lengths, name = encoder.encode(texts)
    assert name == "tiktoken"
    assert files.decode(tokens[: lengths[0]].tolist()) == texts[0]
    assert tokens[lengths[0] :].tolist() == files.encode("a b")


def test_a_special_token_in_the_text_is_text() -> None:
    for kind, text in (("wordpiece", "a [SEP] b"), ("bpe", "a <|endoftext|> b")):
        files = trained(kind)
        tokens, _, _ = make_encoder(files.tokenizer_json).encode([text])
        special = set(files.vocabulary().special_ids) - {1 if kind == "wordpiece" else -1}
        assert not special & set(tokens.tolist())


def test_frames() -> None:
    assert trained("wordpiece").frame() == Frame((2,), (3,))
    assert trained("wordpiece").pair_frame() == PairFrame((2,), (3,), (3,))
    assert trained("bpe").frame() == Frame(end=(0,))
    with pytest.raises(UserError, match="no token between two texts"):
        trained("bpe").pair_frame()


def test_continuations() -> None:
    files = trained("wordpiece")
    from tokenizers import Tokenizer

    for kind, mark in (("wordpiece", "##"), ("bpe", "Ġ")):
        files = trained(kind)
        parsed = Tokenizer.from_str(files.tokenizer_json)
        tokens = {parsed.id_to_token(token) for token in files.vocabulary().continuation_ids}
        assert tokens
        if kind == "wordpiece":
            assert all(token.startswith(mark) for token in tokens)
        else:
            assert not any(token.startswith((mark, "Ċ", ",", "(")) for token in tokens)
            assert "e" in tokens


def test_a_tokenizer_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"^tokenizer.load: ./nowhere: cannot be loaded"):
        load_tokenizer("./nowhere")
