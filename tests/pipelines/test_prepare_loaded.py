"""`prepare` with tokenizers of other people: nothing drawn at random, every sample in its frame."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastrata_pipelines.format import Manifest
from elastrata_pipelines.preparation import PrepareConfig, prepare
from elastrata_pipelines.preparation.provenance import PROVENANCE, Provenance
from elastrata_pipelines.preparation.tokenizer import switch_off_randomness
from elastrata_pipelines.storage import Storage
from support.random_tokenizers import Description, described
from support.texts import plain_text


def save(folder: Path, description: Description, **config: Any) -> str:
    """The folder of a tokenizer as transformers saves it."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return str(folder)


def with_dropout() -> Description:
    description = described("bytes")
    description["model"]["dropout"] = 0.25
    return description


def prepared(
    out: Path, tokenizer: str, texts: list[str], **changes: Any
) -> tuple[Manifest, list[str]]:
    """The manifest of a data set of these documents, and the stages that were reported."""
    corpus = out.parent / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
    )
    values = {
        "sources": [{"paths": [str(corpus)]}],
        "tokenizer": {"load": tokenizer},
        "seq_len": 32,
        **changes,
    }
    stages: list[str] = []
    config = PrepareConfig.model_validate(values)
    manifest = prepare(config, str(out), progress=lambda stage, *_: stages.append(stage))
    return manifest, stages


@pytest.mark.usefixtures("ray_local")
def test_dropout_is_switched_off_in_a_line(tmp_path: Path) -> None:
    texts = [plain_text(seed, 200) for seed in range(40)]
    drawn, whole = (
        save(tmp_path / "drawn", with_dropout()),
        save(tmp_path / "a", described("bytes")),
    )
    made = [prepared(tmp_path / name, drawn, texts) for name in ("first", "second")]
    plain, plain_stages = prepared(tmp_path / "plain", whole, texts)
    line = "the tokenizer's dropout 0.25 is switched off: ids are not drawn"
    assert [line in stages for _, stages in made] == [True, True]
    assert made[0][0].fingerprint == made[1][0].fingerprint
    assert made[0][0].tokens == plain.tokens
    assert made[0][0].tokenizer_fingerprint == plain.tokenizer_fingerprint
    assert not any("switched off" in stage for stage in plain_stages)
    kept = [Provenance.read(Storage(str(tmp_path / name))) for name in ("first", "plain")]
    assert [found and found.switched_off for found in kept] == [("dropout 0.25",), ()]
    assert "switched_off" not in (tmp_path / "plain" / PROVENANCE).read_text(encoding="utf-8")


@pytest.mark.usefixtures("ray_local")
def test_types_of_pairs_other_than_in_training_are_told(tmp_path: Path) -> None:
    roberta = {
        "type": "RobertaProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1],
        "trim_offsets": True, "add_prefix_space": False,
    }  # fmt: skip
    folder = save(tmp_path / "dna", {**described("dna"), "post_processor": roberta})
    texts = ["GATTACA. CCGT. TTTT. ACGT." * 4] * 3
    _, stages = prepared(tmp_path / "out", folder, texts, pairs=True)
    assert "the tokenizer's types of pairs are not 0 and 1, as in training" in stages


def test_sampling_of_unigrams_is_switched_off() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(described("unigram")))
    tokenizer.model.alpha, tokenizer.model.nbest_size = 0.1, 5
    assert switch_off_randomness(tokenizer) == ["alpha 0.1", "nbest_size 5"]
    assert len({tuple(tokenizer.encode(plain_text(0, 300)).ids) for _ in range(5)}) == 1
