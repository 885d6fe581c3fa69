"""Files of text, archives in archives among them, cut off, damaged or called what they are not: the
very documents, or lines that name the file. Never other documents, or fewer, without a word."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from elastrata_pipelines.errors import UserError
from support.archives import NO_TEXTS, parquet, read, tar, zstd
from support.mutations import mutated_bytes, quick, seeds
from support.verdict import read_or_refused

CASES = quick(50)
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}
ENDINGS = ("", ".txt", ".jsonl", ".parquet", ".tar", ".tgz", ".gz", ".tar.xz", ".txt.zst", ".bz2")


@dataclass(frozen=True)
class Given:
    """A file, and what is to come of it."""

    kind: str
    name: str
    data: bytes
    texts: tuple[str, ...]
    refused: tuple[str, ...] = ()
    """How it, or members of it, are called in the lines that refuse them."""


def drawn(rng: random.Random, level: int = 0) -> Given:
    kind = rng.choice(["text", "jsonl", "parquet", "no text", "tar", "tar", "tar"][: 7 - level])
    stem, ending = f"{rng.choice('abcdef')}{rng.randrange(1000)}", rng.choice([*PACKED])
    texts = tuple(f"ünï {rng.random()} " * rng.randrange(1, 40) for _ in range(rng.randrange(1, 5)))
    refused: tuple[str, ...] = ()
    if kind == "text":
        texts = ("\n".join(texts),)
        name, data = f"{stem}.txt{ending}", texts[0].encode()
    elif kind == "jsonl":
        lines = [json.dumps({"text": text}, ensure_ascii=rng.random() < 0.5) for text in texts]
        name, data = f"{stem}.jsonl{ending}", "\n".join(lines).encode()
    elif kind == "parquet":
        name, data = f"{stem}.parquet{ending}", parquet(*texts)
    elif kind == "no text":
        # a tar archive is read where it is packed, or in another
        data, _ = NO_TEXTS[rng.choice([name for name in NO_TEXTS if name != "tar"])]
        name, texts = f"{stem}.txt{ending}", ()
        refused = (name,)
    else:
        inside = {one.name: one for one in (drawn(rng, level + 1) for _ in range(4 - level))}
        name = f"{stem}.tar{ending}" if rng.random() < 0.5 or not ending else f"{stem}{ending}"
        data = tar({member: one.data for member, one in inside.items()})
        texts = tuple(text for one in inside.values() for text in one.texts)
        refused = tuple(f"{name}: {line}" for one in inside.values() for line in one.refused)
    return Given(kind, name, PACKED[ending](data), texts, refused)


def altered(given: Given, rng: random.Random) -> tuple[str, str, bytes]:
    """What is done to a file, and its name and bytes thereafter."""
    checked = given.name.endswith((".gz", ".bz2", ".xz"))  # others tell nothing of every byte
    how = rng.choice(["nothing", "cut", "renamed", "damaged"])
    if how == "cut" and (given.kind == "tar" or Path(given.name).suffix in PACKED):
        at = rng.randrange(1, len(given.data))
        return f"cut at {at}", given.name, given.data[:at]
    if how == "renamed" and given.kind in ("text", "tar", "parquet"):
        name = Path(given.name).name.partition(".")[0] + rng.choice(ENDINGS)
        return f"called {name}", name, given.data
    if how == "damaged" and checked:
        what, data = mutated_bytes(given.data, rng)
        return what, given.name, data
    return "", given.name, given.data


@pytest.mark.parametrize("seed", seeds())
def test_text_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    refusals = 0
    for number in range(CASES):
        given = drawn(rng)
        how, name, data = altered(given, rng)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_bytes(data)
        case = f"seed {seed}, case {number}: {given.name} {how}"
        size = rng.choice([64, 2**20])
        found = read_or_refused(partial(texts_of, folder, size=size), case, name)
        if not how and given.refused:
            _, problems, _ = read(folder)
            assert [line.partition(": cannot be read")[0] for line in problems] == [*given.refused]
        if found is not None and data:
            assert not (given.refused and not how), case
            assert found == given.texts, case
        refusals += found is None
        kept, problems, left_out = read(folder, size=size, skip=True)
        texts = [document.text for document in kept]
        left = iter(given.texts)
        assert all(text in left for text in texts), case  # these, in this order, and no others
        assert found is None or texts == [*found], case
        assert found is not None or left_out or problems, case
    assert 0 < refusals < CASES


def texts_of(folder: Path, *, size: int) -> tuple[str, ...]:
    documents, problems, _ = read(folder, size=size)
    if problems:
        raise UserError(*problems)
    return tuple(document.text for document in documents)
