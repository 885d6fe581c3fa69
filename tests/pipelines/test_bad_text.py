"""Bad text: each mistake is one line that names the file and the place; nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.preparation import PrepareConfig, prepare
from elastrata_pipelines.preparation.training import train_tokenizer

pytestmark = pytest.mark.usefixtures("ray_local")

TEXT = "Some text that is long enough to be a sample. " * 20


def config(path: Path | str | list[str], **changes: Any) -> PrepareConfig:
    source = {"paths": path if isinstance(path, list) else [str(path)]}
    source |= {name: changes.pop(name) for name in ("documents", "text_field") if name in changes}
    values = {"sources": [source], "tokenizer": {"train": "bpe", "vocab_size": 300}, "seq_len": 32}
    return PrepareConfig.model_validate({**values, **changes})


def problems(folder: Path, wanted: PrepareConfig) -> list[str]:
    """The lines about a corpus in `folder`, its path replaced by `.`"""
    out = folder / "out"
    with pytest.raises(UserError) as caught:
        prepare(wanted, str(out))
    assert not out.exists()
    return [problem.replace(f"{folder}/", "./") for problem in caught.value.problems]


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_missing_and_empty_files(tmp_path: Path) -> None:
    write(tmp_path / "empty.txt", "")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "hollow").mkdir()
    write(tmp_path / "hollow" / "a.txt", "")
    names = ["missing.txt", "*.md", "nothing", "hollow", "empty.txt"]
    assert problems(tmp_path, config([str(tmp_path / name) for name in names])) == [
        "./missing.txt: no such file or folder, or nothing in it",
        "./*.md: no such file or folder, or nothing in it",
        "./nothing: no such file or folder, or nothing in it",
        "./hollow: 1 file in it, all empty",
        "./empty.txt: the file is empty",
    ]


def test_an_unknown_protocol(tmp_path: Path) -> None:
    assert problems(tmp_path, config("nope://bucket/file")) == [
        "nope://bucket/file: cannot be read (Protocol not known: nope)"
    ]


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"\xef\xbb\xbfgood\ncaf\xe9 au lait\nfine\n\xff\n")
    write(tmp_path / "b.txt", TEXT)
    write(tmp_path / "c.txt", TEXT.encode("utf-16"))
    assert problems(tmp_path, config(tmp_path, documents="line")) == [
        "./c.txt: cannot be read (UTF-16, expected UTF-8 text; "
        "`iconv -f UTF-16 -t UTF-8 FILE` stores it as that)",
        "./a.txt: not UTF-8 at byte 11",
        "./a.txt: not UTF-8 at byte 26",
    ]


def test_json_lines_that_are_broken_or_lack_the_field(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": TEXT}), "", '{"text": ', json.dumps({"body": "x", "id": 1}),
        json.dumps({"text": 7}), json.dumps(["text"]), '{"text": "\\ud800"}',
    ]  # fmt: skip
    write(tmp_path / "a.jsonl", "\n".join(lines).encode() + b'\n{"text": "\xff"}\n')
    assert problems(tmp_path, config(tmp_path / "a.jsonl")) == [
        "./a.jsonl:3: not valid JSON (Expecting value: line 1 column 10 (char 9))",
        "./a.jsonl:4: no field 'text' (text_field, --text-field); it has body, id",
        "./a.jsonl:5: field 'text' is int, not text",
        "./a.jsonl:6: a JSON object was expected, not list",
        "./a.jsonl:7: field 'text' holds half of a surrogate pair",
        "./a.jsonl:8: not UTF-8 (byte 10 of the line)",
    ]


@pytest.mark.parametrize("documents", ["file", "line"])
def test_a_document_over_the_limit(tmp_path: Path, documents: str) -> None:
    write(tmp_path / "a.txt", "short\n" + "x" * 5000 if documents == "line" else "x" * 5000)
    line = 2 if documents == "line" else 1
    assert problems(
        tmp_path, config(tmp_path / "a.txt", documents=documents, max_document_bytes=4000)
    ) == [
        f"./a.txt: the document that begins at line {line} is longer than max_document_bytes "
        "(4000); cut it (documents: line or paragraph, or document_start) or raise the limit"
    ]


def test_nothing_left_after_filtering(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "few words")
    assert problems(tmp_path, config(tmp_path / "a.txt", min_tokens=25)) == [
        "sources.0: source-0: nothing is left of it: 1 document, no sample of at least min_tokens "
        "(25) tokens"
    ]
    write(tmp_path / "a.txt", "\n \n\t\n")
    assert problems(tmp_path, config(tmp_path / "a.txt")) == [
        "sources.0: source-0: nothing is left of it: 0 documents"
    ]


def test_a_source_that_gives_nothing_is_named_with_what_was_skipped(tmp_path: Path) -> None:
    write(tmp_path / "good.txt", TEXT)
    write(tmp_path / "bad.jsonl", 'no json\n{"body": 1}\n{"body": 2}\n')
    wanted = config(tmp_path / "good.txt", bad_documents="skip").model_dump()
    wanted["sources"] += ({"paths": [str(tmp_path / "bad.jsonl")], "name": "bad"},)
    line = "sources.1: bad: nothing is left of it: 0 documents, skipped 2 no text field, 1 not JSON"
    assert problems(tmp_path, PrepareConfig.model_validate(wanted)) == [line]
    trained = train_tokenizer([TEXT], config(tmp_path).tokenizer, seq_len=32)
    write(tmp_path / "tokenizer.json", trained.tokenizer_json)
    loaded = {**wanted, "tokenizer": {"load": str(tmp_path / "tokenizer.json")}}
    assert problems(tmp_path, PrepareConfig.model_validate(loaded)) == [line]


def test_nothing_held_out(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", TEXT)
    (line,) = problems(tmp_path, config(tmp_path / "a.txt", held_out=1e-9))
    assert line.startswith("held_out: of a single document nothing can be held out")


def test_many_problems_end_early(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", "x\n" * 500)
    found = problems(tmp_path, config(tmp_path / "a.jsonl"))
    assert len(found) == 101
    assert found[-1] == "... and more; only the first are listed"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", TEXT)
    out = write(tmp_path / "file", "x") / "out"
    with pytest.raises(UserError, match=r"file/out: cannot be read \(.*\)$"):
        prepare(config(tmp_path / "a.txt"), str(out))


def test_a_folder_with_other_files(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", TEXT)
    with pytest.raises(UserError, match=r"holds other files \(a.txt\); choose an empty or new"):
        prepare(config(tmp_path / "a.txt"), str(tmp_path))


def test_a_sequence_too_short_for_the_special_tokens() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 8"):
        config("a.txt", seq_len=2)


def test_bad_documents_can_be_skipped(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"caf\xe9")
    write(tmp_path / "b.txt", TEXT)
    write(tmp_path / "c.jsonl", json.dumps({"text": TEXT}) + "\nnot json\n")
    wanted = config(tmp_path, bad_documents="skip")
    manifest = prepare(wanted, str(tmp_path / "out"))
    (source,) = manifest.sources
    assert source.documents == 2
    assert source.documents_skipped == {"not JSON": 1, "not UTF-8": 1}
