"""Provenance: what a data set was made from is told key by key where another is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.preparation import PrepareConfig
from elastrata_pipelines.preparation.corpus import Corpus
from elastrata_pipelines.preparation.provenance import PROVENANCE, Provenance
from elastrata_pipelines.preparation.target import Target
from elastrata_pipelines.storage import Storage
from support.synthetic import write_data_set


def provenance(folder: Path, **changes: Any) -> Provenance:
    values = {
        "sources": [{"paths": [str(folder)], "name": "texts"}],
        "tokenizer": {"train": "bpe", "vocab_size": 300},
        "seq_len": 32,
    }
    config = PrepareConfig.model_validate({**values, **changes})
    return Corpus.find(config, lambda *_: None).provenance(None)


def test_differences_of_sources_and_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text", encoding="utf-8")
    first = provenance(tmp_path)
    (tmp_path / "a.txt").write_text("same size", encoding="utf-8")
    (line,) = first.differences(provenance(tmp_path))
    assert line.startswith("files of texts: 1 of 9 bytes (")
    assert ", now 1 of 9 bytes (" in line
    assert line != first.differences(first)
    source = {"paths": [str(tmp_path)], "name": "other"}
    assert provenance(tmp_path).differences(provenance(tmp_path, sources=[source])) == [
        'sources.0.name: "texts", now "other"'
    ]


def test_the_target_names_what_differs_and_what_was_not_kept(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text", encoding="utf-8")
    write_data_set(tmp_path / "out", samples=50)
    storage = Storage(str(tmp_path / "out"))
    asked = provenance(tmp_path / "text", seq_len=64)

    def problems() -> tuple[str, ...]:
        with pytest.raises(UserError) as caught:
            Target(storage).prepared("0" * 64, asked, held_out=False, overwrite=False)
        return caught.value.problems

    first, second = problems()
    assert "made with another configuration" in first
    assert second.endswith("an earlier version made it, which did not keep its configuration")

    storage.write(provenance(tmp_path / "text").to_json(), PROVENANCE)
    assert problems() == (first, f"{storage.uri()}: seq_len: 32, now 64")

    storage.write(b'{"configuration": [', PROVENANCE)
    (torn,) = problems()
    assert torn.startswith(f"{storage.uri(PROVENANCE)}: not JSON")
