"""Text as users have it: folders with other files in them, files that change, odd ways to store
text; each read, or refused in a line that says how to make it readable."""

from __future__ import annotations

import gzip
import io
import json
import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.preparation import PrepareConfig, SourceConfig, prepare
from elastrata_pipelines.preparation.corpus import Corpus
from elastrata_pipelines.preparation.documents import read_documents
from elastrata_pipelines.preparation.local_files import is_sidecar
from elastrata_pipelines.preparation.portions import Portion, read_portions
from elastrata_pipelines.preparation.provenance import SIDECAR
from elastrata_pipelines.preparation.sources import SourceFile, find_changes, find_files
from elastrata_pipelines.storage import Storage
from support.archives import tar

LIMIT = 2**20


def _source(*paths: Path | str, **settings: Any) -> SourceConfig:
    return SourceConfig.model_validate({"paths": [*map(str, paths)], "name": "s", **settings})


def _portions(files: list[SourceFile], config: SourceConfig) -> list[Portion]:
    return list(read_portions(files, config, size=LIMIT, max_document_bytes=LIMIT))


def _read(config: SourceConfig) -> tuple[list[str], list[str]]:
    """The texts of a source, and all lines about what could not be read."""
    found, texts = find_files(0, config), list[str]()
    problems = [*found.problems, *found.others]
    for portion in _portions(found.files, config):
        documents = read_documents(portion, config, max_document_bytes=LIMIT)
        texts += [document.text for document in documents.documents]
        problems += [*documents.fatal, *documents.problems]
    return texts, problems


def _config(*sources: dict[str, Any], **changes: Any) -> PrepareConfig:
    return PrepareConfig.model_validate(
        {
            "sources": [*sources],
            "tokenizer": {"train": "bpe", "vocab_size": 300},
            "seq_len": 16,
            **changes,
        }
    )


SIDECARS = [
    "_SUCCESS", "_metadata", "_common_metadata", "_committed_17", "_started_17",
    "_temporary/0/part-1.txt", ".part-0.txt.crc", "part-0.txt.crc", ".gitattributes", ".git/config",
    "README.md", "deep/README.md", "dataset_infos.json", "dataset_info.json", "part-9._COPYING_",
    "_delta_log/00.json", "__pycache__/a.pyc", ".venv/a.py",
]  # fmt: skip
DATA = [
    "__init__.py",
    "_core/a.py",
    "part-0.txt",
    "_year=2024/part-0.txt",
    "notes.md",
    "a_b.txt",
    "deep/SUCCESS.txt",
]


@pytest.mark.parametrize("pattern", ["", "/**"])
@pytest.mark.parametrize("protocol", ["", "memory://"])
def test_files_beside_the_data_are_passed_over_and_counted(
    tmp_path: Path, pattern: str, protocol: str
) -> None:
    root = f"{protocol}{tmp_path}"
    fs = fsspec.filesystem("memory" if protocol else "file")
    for name in [*SIDECARS, *DATA]:
        fs.makedirs(f"{tmp_path}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{tmp_path}/{name}", f"in {name}".encode())
    try:
        found = find_files(0, _source(f"{root}{pattern}"))
        assert sorted(file.name for file in found.files) == sorted(DATA)
        assert found.problems == found.others == []
        assert found.sidecars >= len(SIDECARS) - 1
        # Named, or matched by a glob that asks for such names, they are read.
        for name in ("README.md", "_SUCCESS", ".gitattributes", "_temporary/0/part-1.txt"):
            assert _read(_source(f"{root}/{name}")) == ([f"in {name}"], [])
        assert _read(_source(f"{root}/_succ*", f"{root}/_SUCC*"))[0] == ["in _SUCCESS"]
    finally:
        fs.rm(str(tmp_path), recursive=True)


def test_names_that_only_look_like_them_are_data() -> None:
    assert not any(map(is_sidecar, ["a/b=_c/d.txt", "../x.txt", "./x.txt", "a._c", "readme.md"]))


def test_members_of_archives_beside_the_data_are_counted(tmp_path: Path) -> None:
    members = {"d/_SUCCESS": b"s", "d/README.md": b"card", ".h/a.txt": b"h", "d/a.txt": b"text"}
    (tmp_path / "a.tar").write_bytes(tar(members))
    config = _source(tmp_path)
    (portion,) = _portions(find_files(0, config).files, config)
    assert [bytes(piece.data) for piece in portion.pieces] == [b"text"]
    assert portion.sidecars == 4  # `tar` adds a hidden one


def test_a_folder_without_data_says_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "_SUCCESS").touch()
    (line,) = find_files(0, _source(tmp_path)).problems
    assert line == (
        f"{tmp_path}: nothing in it but 1 file beside the data, such as _SUCCESS; a path that "
        "names one reads it"
    )


@pytest.mark.usefixtures("ray_local")
def test_a_data_set_counts_them(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"a text of its own, {number}", encoding="utf-8")
    (text / "_SUCCESS").touch()
    (text / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    (text / "a.tar").write_bytes(tar({".hidden": b"x", "b.txt": b"in an archive"}))
    manifest = prepare(_config({"paths": str(text)}), str(tmp_path / "data"))
    assert manifest.sources[0].documents_skipped == {SIDECAR: 4}
    assert manifest.sources[0].documents == 41


def test_a_file_that_grows_is_read_up_to_the_size_it_had(tmp_path: Path) -> None:
    whole, more = b"a line\n" * 3000, b"more\n" * 2000
    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["a row"]}), table)
    contents = {"a.txt": whole, "b.txt.gz": gzip.compress(whole), "c.parquet": table.getvalue()}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    config = _source(tmp_path)
    files = find_files(0, config).files
    for name in contents:
        with (tmp_path / name).open("ab") as stream:
            stream.write(more)
    (portion,) = _portions(files, config)
    assert portion.problems == ()
    assert [bytes(piece.data) for piece in portion.pieces] == [whole, whole, b"a row"]
    altered, longer = find_changes(files)
    assert altered == []
    sizes = {name: len(content) for name, content in contents.items()}
    assert longer == [
        f"{tmp_path / name}: grew to {size + len(more):,} bytes; its first {size:,} were read"
        for name, size in sizes.items()
    ]


@pytest.mark.parametrize(
    ("change", "is_altered"),
    [
        (lambda path: path.write_bytes(b"other line\n"), True),
        (lambda path: path.write_bytes(b"b line\n" * 20_000), True),
        (lambda path: path.write_bytes(path.read_bytes()), False),
        (lambda path: path.unlink(), False),
    ],
)
def test_a_file_that_is_written_anew_is_noticed(
    tmp_path: Path, change: Callable[[Path], Any], is_altered: bool
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a line\n" * 10_000)
    files = find_files(0, _source(tmp_path)).files
    change(path)
    assert find_changes(files) == (
        [f"{path}: was changed while it was read; prepare it again"] * is_altered,
        [],
    )


def test_a_file_that_shrinks_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a line\n" * 10_000)
    config = _source(tmp_path)
    files = find_files(0, config).files
    (tmp_path / "a.txt").write_bytes(b"a line\n")
    (portion,) = _portions(files, config)
    assert portion.problems == (
        f"{tmp_path}/a.txt: cannot be read (it shrank from 70,000 bytes to 7 while it was read)",
    )


class _Growing:
    """Progress of a preparation during which its text grows, or is replaced."""

    def __init__(self, file: Path, *, replaced: bool) -> None:
        self._file, self._replaced, self._is_done = file, replaced, False
        self.stages: list[str] = []

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        self.stages.append(stage)
        if stage == "train the tokenizer" and not self._is_done:
            self._is_done = True
            before = self._file.read_bytes()
            after = before.upper() if self._replaced else before + b"one more\n"
            self._file.write_bytes(after)


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("replaced", [False, True])
def test_a_preparation_says_that_its_text_changed(tmp_path: Path, replaced: bool) -> None:
    (tmp_path / "a.txt").write_text("a line of the text\n" * 100, encoding="utf-8")
    config = _config({"paths": str(tmp_path / "a.txt"), "documents": "line"})
    progress = _Growing(tmp_path / "a.txt", replaced=replaced)
    if replaced:
        with pytest.raises(UserError, match=r"a\.txt: was changed while it was read"):
            prepare(config, str(tmp_path / "data"), progress=progress)
        assert Manifest.find(Storage(str(tmp_path / "data"))) is None
    else:
        manifest = prepare(config, str(tmp_path / "data"), progress=progress)
        assert manifest.sources[0].documents == 100
        assert (
            f"{tmp_path}/a.txt: grew to 1,909 bytes; its first 1,900 were read" in progress.stages
        )


def _with_window(text: bytes, log: int) -> bytes:
    parameters = zstd.CompressionParameter
    options = {parameters.window_log: log, parameters.enable_long_distance_matching: 1}
    compressor = zstd.ZstdCompressor(options=options)
    # In parts, so that the header does not have the size.
    return compressor.compress(text) + compressor.flush()


def test_zstd_frames_with_large_windows_are_read(tmp_path: Path) -> None:
    row = json.dumps({"text": "a row"}).encode() + b"\n"
    skippable = b"\x5a\x2a\x4d\x18\x02\x00\x00\x00ab"
    (tmp_path / "a.jsonl.zst").write_bytes(skippable + _with_window(row, 31))
    (tmp_path / "b.jsonl.zst").write_bytes(_with_window(row, 20) + _with_window(row, 27))
    assert _read(_source(tmp_path)) == (["a row"] * 3, [])
    told: list[str] = []
    Corpus.find(_config({"paths": str(tmp_path)}), lambda stage, *_: told.append(stage))
    (tmp_path / "b.jsonl.zst").unlink()
    Corpus.find(_config({"paths": str(tmp_path)}), lambda stage, *_: told.append(stage))
    assert told == [
        f"{tmp_path}/a.jsonl.zst: each process takes 2,048 MiB for the window of its zstd data"
    ]


ROWS = [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    ("content", "how"),
    [
        (json.dumps(ROWS).encode(), "a JSON array, expected JSON Lines, an object in each line; "
         "`jq -c '.[]' FILE` makes them"),
        (b"\xef\xbb\xbf\n" + json.dumps(ROWS * 900, indent=1).encode(), "a JSON array, "),
        (json.dumps(ROWS * 900).encode(), "a JSON array, "),
        (json.dumps(ROWS[0], indent=1).encode(), "a JSON object over several lines, expected JSON "
         "Lines, an object in each line; `jq -c . FILE` makes it one"),
        (json.dumps(ROWS[0]).encode("utf-16"), "`iconv -f UTF-16 -t UTF-8 FILE` stores it as that"),
        (json.dumps(ROWS[0]).encode("utf-16-be"), "`iconv -f UTF-16BE -t UTF-8 FILE` stores"),
        (json.dumps(ROWS[0]).encode("utf-32"), "`iconv -f UTF-32 -t UTF-8 FILE` stores it as that"),
    ],
)  # fmt: skip
def test_json_that_is_no_json_lines_says_how_to_convert_it(
    tmp_path: Path, content: bytes, how: str
) -> None:
    (tmp_path / "a.json").write_bytes(content)
    texts, (problem,) = _read(_source(tmp_path))
    assert texts == []
    assert problem.startswith(f"{tmp_path}/a.json: cannot be read (")
    assert how in problem


def test_an_array_among_lines_is_one_bad_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'[1]\n{"text": "b"}\n')
    texts, (problem,) = _read(_source(tmp_path))
    assert (texts, problem) == (
        ["b"], f"{tmp_path}/a.jsonl:1: a JSON object was expected, not list"
    )  # fmt: skip


def test_nested_fields_are_named_with_dots(tmp_path: Path) -> None:
    rows = [{"a": {"b": {"text": "one"}}, "x.y": "three"}, {"a": {"b": {"text": "two"}}}]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    nested = pa.array([row["a"] for row in rows])
    other = pa.array([{"c": number, "b": {"text": "not this"}} for number in range(2)])
    pq.write_table(pa.table({"o": other, "a": nested}), tmp_path / "b.parquet")
    config = _source(tmp_path, text_field="a.b.text")
    assert _read(config) == (["one", "two"] * 2, [])
    # A name with a dot in it is taken first.
    assert _read(_source(tmp_path / "a.jsonl", text_field="x.y"))[0] == ["three"]
    _, (last, first, _) = _read(_source(tmp_path, text_field="text"))
    assert first.endswith("no field 'text' (text_field, --text-field); it has a, x.y (did you mean "
                          "'a.b.text'?)")  # fmt: skip
    assert last.endswith("it has o, a (did you mean 'o.b.text'?))")


def test_a_row_whose_outer_field_is_null_is_a_bad_document(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [{"text": "one"}, None]}), tmp_path / "b.parquet")
    texts, (problem,) = _read(_source(tmp_path, text_field="a.text"))
    assert (texts, problem) == (
        ["one"], f"{tmp_path}/b.parquet: row 1: column 'a.text' is null"
    )  # fmt: skip


@pytest.mark.usefixtures("ray_local")
def test_a_wrong_text_field_is_one_line_with_the_nearest(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rows = "".join(json.dumps({"content": f"{n}", "id": n}) + "\n" for n in range(500))
        (tmp_path / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    pq.write_table(pa.table({"content": ["x"], "id": [1]}), tmp_path / "c.parquet")
    with pytest.raises(UserError) as refused:
        prepare(_config({"paths": str(tmp_path), "text_field": "contents"}), str(tmp_path / "d"))
    column, field = refused.value.problems
    assert field == (
        f"{tmp_path}/a.jsonl:1: no field 'contents' (text_field, --text-field); it has content, id "
        "(did you mean 'content'?) (and 999 more like it, of those read so far)"
    )
    assert column.startswith(f"{tmp_path}/c.parquet: cannot be read (no column 'contents' (text_")


class _Chunked(BaseHTTPRequestHandler):
    """Answers in chunks, without a size, as servers do that make their answers."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        content = FILES.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Content-Type", "application/octet-stream")
        self.end_headers()
        for begin in range(0, len(content or b""), 1000) if self.command == "GET" else ():
            part = (content or b"")[begin : begin + 1000]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        if self.command == "GET":
            self.wfile.write(b"0\r\n\r\n")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


FILES = {"/a.txt": b"a line\n" * 3000, "/b.txt.gz": gzip.compress(b"packed"), "/empty.txt": b""}


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Chunked) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_answer_in_chunks_is_not_empty(server: str) -> None:
    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["a row"]}), table)
    FILES["/c.parquet"] = table.getvalue()
    config = _source(*(f"{server}/{name}" for name in ("a.txt", "b.txt.gz", "c.parquet")))
    assert _read(config) == (["a line\n" * 3000, "packed", "a row"], [])
    (file, *_) = find_files(0, config).files
    assert (file.bytes, bool(file.stamp)) == (21_000, True)
    (line,) = find_files(0, _source(f"{server}/empty.txt")).problems
    assert line == f"{server}/empty.txt: the file is empty"
    (line,) = find_files(0, _source(f"{server}/nothing.txt")).problems
    assert line == f"{server}/nothing.txt: no such file or folder, or nothing in it"


def test_a_data_set_that_cannot_be_reached_is_not_absent(server: str, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        # Bound, but nothing listens.
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/data"
        with pytest.raises(UserError, match=r"cannot be read \(Connection refused\)"):
            Manifest.find(Storage(url))
    assert Manifest.find(Storage(f"{server}/data")) is None
    (tmp_path / "data").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match=r"no data set can be read there \(a link to something"):
        Manifest.find(Storage(str(tmp_path / "data")))
