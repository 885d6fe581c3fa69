"""Text on the Hugging Face Hub: the hub's own client, against a hub of ours."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfFileSystem, close_session, constants

from elastrata_pipelines.preparation import PrepareConfig, SourceConfig
from elastrata_pipelines.preparation.documents import read_documents
from elastrata_pipelines.preparation.portions import Group, ReadWork
from elastrata_pipelines.preparation.sources import find_files
from support.hub import Hub, local_hub

TEXTS = [f"text {number}" for number in range(2000)]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with local_hub() as hub:
        table = pa.table({"title": TEXTS, "body": [text.upper() for text in TEXTS]})
        rows = io.BytesIO()
        pq.write_table(table, rows, row_group_size=100, compression="none")
        hub.data_sets["me/texts"] = {
            "README.md": b"A card.",
            "data/lines.jsonl": b'{"text": "a line"}\n',
            "data/rows.parquet": rows.getvalue(),
        }
        # What HF_ENDPOINT says, had it been set when the client was imported.
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
            monkeypatch.setattr(constants, name, 300)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        close_session()  # the next one reads the proxies of this environment
        HfFileSystem.clear_instance_cache()
        yield hub
        HfFileSystem.clear_instance_cache()
        close_session()


def read(path: str, **changes: object) -> list[str]:
    """The documents, read as a process of a preparation reads them."""
    source = SourceConfig.model_validate({"paths": path, "name": "hub", **changes})
    config = PrepareConfig.model_validate(
        {"sources": [source.model_dump()], "tokenizer": {"load": "x"}, "seq_len": 32}
    )
    found = find_files(0, source)
    assert found.problems == []
    portions = ReadWork(config, portion_bytes=2**12)(Group(0, tuple(found.files)))
    parts = [read_documents(one.portion, source, max_document_bytes=2**20) for one in portions]
    assert not any(part.problems or part.fatal for part in parts)
    return [document.text for part in parts for document in part.documents]


def test_a_column_of_a_parquet_file_on_the_hub_is_read(hub: Hub) -> None:
    assert read("hf://datasets/me/texts/data/rows.parquet", text_field="title") == TEXTS
    assert read("hf://datasets/me/texts/data/*.parquet", text_field="body")[7] == "TEXT 7"


def test_a_file_on_the_hub_that_changes_is_another_one(hub: Hub) -> None:
    """By its blob's id: the data set is prepared again."""
    source = SourceConfig(paths=("hf://datasets/me/texts/data/lines.jsonl",))
    (before,) = find_files(0, source).files
    hub.data_sets["me/texts"]["data/lines.jsonl"] = b'{"text": "b line"}\n'
    HfFileSystem.clear_instance_cache()
    (after,) = find_files(0, source).files
    assert before.bytes == after.bytes
    assert before.stamp != after.stamp


def test_what_is_not_on_the_hub_is_told(hub: Hub) -> None:
    for path in ("hf://datasets/me/texts/nothing", "hf://datasets/me/others/data"):
        (problem,) = find_files(0, SourceConfig(paths=(path,))).problems
        assert problem == f"{path}: no such file or folder, or nothing in it"
