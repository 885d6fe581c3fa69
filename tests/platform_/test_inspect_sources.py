"""`inspect` by source, and samples as text: what was prepared can be seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastrata.cli.inspect import show_excerpts, show_sources
from elastrata.cli.main import run
from elastrata.terminal.console import open_console
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.format.manifest import SourceEntry
from elastrata_pipelines.inspection import Excerpt, SourceAccount, source_accounts
from elastrata_pipelines.preparation import PrepareConfig, prepare
from elastrata_pipelines.storage import Storage
from support.synthetic import write_data_set

LINES = [f"Line {n} of a small text, with a second sentence. Here it is!" for n in range(200)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "good.txt").write_text("\n".join(LINES), encoding="utf-8")
    rare = ["".join(chr(0x4E00 + 10 * n + k) for k in range(10)) for n in range(100)]
    mixed = [json.dumps({"text": f"{line} {rare[n]}"}) for n, line in enumerate(LINES[:100])]
    (folder / "mixed.jsonl").write_text(
        "\n".join([*mixed, "not json", '{"body": 1}', "[]"]), encoding="utf-8"
    )
    return folder


def make(corpus: Path, out: Path, **changes: Any) -> None:
    sources = [
        {"paths": [str(corpus / "good.txt")], "name": "good", "documents": "line"},
        {"paths": [str(corpus / "mixed.jsonl")], "name": "mixed", "weight": 2},
    ]
    values = {
        "sources": sources, "tokenizer": {"train": "wordpiece", "vocab_size": 400},
        "seq_len": 64, "held_out": 0.1, "bad_documents": "skip",
    }  # fmt: skip
    prepare(PrepareConfig.model_validate({**values, **changes}), str(out))


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["inspect", *arguments, "--workers", "1", "--batch", "8", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.usefixtures("ray_local")
def test_sources_and_samples_of_a_data_set(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "packed"
    make(corpus, out, packing="best_fit")
    found = inspected(capsys, str(out), "--show", "3")
    good, mixed = found["sources"]
    assert (good["name"], good["weight"], good["skipped"]) == ("good", 1.0, {})
    assert good["documents"] + good["held_out"] == 200
    assert mixed["documents"] + mixed["held_out"] == 100
    assert mixed["skipped"] == {"not JSON": 2, "no text field": 1}
    assert good["tokens"] + mixed["tokens"] == found["tokens"]
    assert good["share"] + mixed["share"] == pytest.approx(1)
    assert good["unknown_share"] < mixed["unknown_share"] < 1
    assert min(good["held_out"], mixed["held_out"]) > 0
    assert len(found["excerpts"]) == 3
    for excerpt in found["excerpts"]:
        assert excerpt["is_next"] is None
        assert excerpt["seen"] is None
        assert all(part.startswith("[CLS] Line") for part in excerpt["parts"])
    assert max(len(excerpt["parts"]) for excerpt in found["excerpts"]) > 1

    assert run(["inspect", str(out), "--workers", "1", "--batch", "8", "--show", "1"]) == 0
    printed = capsys.readouterr().out
    assert "skipped of mixed: 2 not JSON, 1 no text field" in printed
    assert "| [CLS] Line" in printed


def test_what_earlier_versions_wrote_is_read(tmp_path: Path) -> None:
    manifest = write_data_set(tmp_path, samples=100)
    entry = {
        "name": "texts", "weight": 1.0, "documents": 90, "documents_skipped": 3, "bytes_read": 5,
        "samples": 100, "tokens": manifest.tokens,
    }  # fmt: skip
    earlier = manifest.model_copy(update={"sources": (SourceEntry.model_validate(entry),)})
    earlier.write(Storage(str(tmp_path)))
    written = Manifest.read(Storage(str(tmp_path)))
    (account,) = source_accounts(Storage(str(tmp_path)), written)
    assert account.skipped == {"reason not kept": 3}
    assert (account.share, account.unknown_share, account.held_out) == (1.0, None, 0)


def test_text_and_names_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    console = open_console(as_json=False)
    parts = ["one\ntwo \x1b[2J [bold]three[/bold]"]
    show_excerpts(console, [Excerpt(sample_id=1, tokens=5, parts=parts, is_next=None)])
    account = SourceAccount(
        name="[red]x", weight=1, documents=1, held_out=0, skipped={}, samples=1, tokens=5, share=1,
        unknown_share=None,
    )  # fmt: skip
    show_sources(console, [account])
    printed = capsys.readouterr().out
    assert "| one\\ntwo \\x1b[2J [bold]three[/bold]\n" in printed
    assert "[red]x" in printed
