"""Mutations: seeded damage to a folder of files: to their bytes, their JSON, the tree they form."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUNDS_VARIABLE = "ELASTRATA_FUZZ_ROUNDS"
_HOLE = "a hole for a value"
_DEEP = 100_000
_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 2**24

HOSTILE = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "minus one": "-1",
    "a fraction": "0.5",
    "not a number": "NaN",
    "infinity": "-Infinity",
    "over the largest float": "1e999",
    "2**31": "2147483648",
    "2**63": "9223372036854775808",
    "2**64": "18446744073709551616",
    "5,000 digits": "9" * 5_000,
    "no text": '""',
    "a number as text": '"1"',
    "a path upwards": '"../../../etc/hostname"',
    "an absolute path": '"/etc/hostname"',
    "lines and control characters": '"a\\nb\\u0000\\u001b[31m\\u2028c"',
    "half a surrogate": '"\\ud800"',
    "long text": f'"{"x" * 100_000}"',
    "no list": "[]",
    "a list": "[1, 2, 3]",
    "a list of texts": '["a", "b"]',
    "a list of lists": "[[0], [1]]",
    "no object": "{}",
    "an object": '{"a": 1}',
    "deep lists": "[" * _DEEP + "]" * _DEEP,
    "deep objects": '{"a":' * _DEEP + "1" + "}" * _DEEP,
}
"""JSON texts that a value is replaced with, by what they are."""


@dataclass(frozen=True)
class Mutation:
    """One damage: `apply` does it to a copy of the folder that it was drawn for."""

    name: str
    """What it does to which file: with the seed enough to find it again."""
    apply: Callable[[Path], None]


def seeds() -> range:
    """The seeds to test with: one, or as many as the variable `ELASTRATA_FUZZ_ROUNDS` says."""
    return range(int(os.environ.get(ROUNDS_VARIABLE, "1")))


def quick(cases: int) -> int:
    """All of these cases with `make fuzz`, a quarter of them in the quick suite."""
    return cases if ROUNDS_VARIABLE in os.environ else max(1, cases // 4)


def mutations(folder: Path, rng: random.Random) -> Iterator[Mutation]:
    """Endlessly many mutations of a folder, drawn at random, none twice: of its tree, of bytes, and
    of JSON where a file has any. The folder stays as it is."""
    seen = set[str]()
    for mutation in _drawn(folder, rng):
        if mutation.name not in seen:
            seen.add(mutation.name)
            yield mutation


def _drawn(folder: Path, rng: random.Random) -> Iterator[Mutation]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    trees = sorted(folder.rglob("*"))
    while True:
        kind = rng.choice(("tree", "bytes", "json"))
        path = rng.choice(trees if kind == "tree" else files)
        place = path.relative_to(folder)
        if kind == "tree":
            name, action = _tree_mutation(folder, place, rng)
            yield Mutation(f"{place}: {name}", action)
            continue
        data = path.read_bytes()
        found = mutated_json(data, rng) if kind == "json" else mutated_bytes(data, rng)
        if found is not None:
            name, altered = found
            yield Mutation(f"{place}: {name}", _writing(place, altered))


def _has_room(folder: Path) -> bool:
    """Return whether files can be written there: a container's /dev/shm has 64 MB, and Ray's object
    stores take what they find."""
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > _ROOM_BYTES


@contextmanager
def mutated(folder: Path, mutation: Mutation) -> Iterator[Path]:
    """A copy of a folder with one mutation, for as long as the block lasts. It lies in memory where
    there is such a file system: removing folders takes longer than all that is done to them."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _has_room(_MEMORY) else None) as scratch:
        copy = Path(scratch) / folder.name
        shutil.copytree(folder, copy)
        mutation.apply(copy)
        yield copy


def mutated_bytes(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """What is done to the bytes of a file, and what becomes of them."""
    start, stop = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    at, bit = (rng.randrange(len(data)), rng.randrange(8)) if data else (0, 0)
    some = rng.randbytes(rng.randrange(1, 64))
    flipped = bytes([data[at] ^ 1 << bit]) if data else b"\x01"
    return rng.choice(
        (
            (f"bit {bit} of byte {at} flipped", data[:at] + flipped + data[at + 1 :]),
            (f"cut at byte {start}", data[:start]),
            (f"begins at byte {stop}", data[stop:]),
            (f"bytes {start} to {stop} removed", data[:start] + data[stop:]),
            (f"bytes {start} to {stop} twice", data[:stop] + data[start:]),
            (f"bytes {start} to {stop} zero", data[:start] + bytes(stop - start) + data[stop:]),
            (f"{len(some)} random bytes at {start}", data[:start] + some + data[start:]),
            (f"{len(some)} random bytes over {start}", data[:start] + some + data[start + 64 :]),
            ("a byte that is not UTF-8 at its end", data + b"\xff"),
            ("a line more at its end", data + b"\n{}\n"),
            ("emptied", b""),
            ("zeros in place of all", bytes(len(data))),
            ("random bytes in place of all", rng.randbytes(len(data))),
        )
    )


def mutated_json(data: bytes, rng: random.Random) -> tuple[str, bytes] | None:
    """What is done to the JSON of a file, in a line of it where it has a value on each, and what
    becomes of its bytes; None where it is no JSON."""
    parsed = _parsed(data)
    if parsed is None:
        return None
    number = rng.randrange(len(parsed))
    name, text = _altered(parsed[number], rng)
    lines = [json.dumps(value, indent=None if len(parsed) > 1 else 1) for value in parsed]
    lines[number] = text
    where = f"line {number + 1}: " if len(parsed) > 1 else ""
    return f"{where}{name}", "\n".join(lines).encode() + (b"\n" if data.endswith(b"\n") else b"")


def _parsed(data: bytes) -> list[Any] | None:
    """The value of a JSON file, or those of its lines."""
    for texts in ([data], data.splitlines()):
        try:
            found = [json.loads(text) for text in texts]
        except ValueError:
            continue
        if found and all(isinstance(value, dict | list) for value in found):
            return found
    return None


def _altered(value: Any, rng: random.Random) -> tuple[str, str]:
    """What is done to a value, and its text then. The value itself is changed."""
    where, parent, key = _place(value, rng)
    hostile = rng.choice(list(HOSTILE))
    deed = rng.choice(
        ("replaced", "replaced", "nudged", "deleted", "beside it", "twice", "swapped")
    )
    if deed == "replaced":
        parent[key] = _HOLE
        return f"{where}: {hostile}", _text(value, hostile)
    if deed == "beside it":
        _add(parent, key, _HOLE)
        return f"beside {where}: {hostile}", _text(value, hostile)
    if deed == "nudged":
        parent[key] = _nudged(parent[key], rng)
        return f"{where}: {str(parent[key])[:40]}", _text(value)
    if deed == "deleted":
        del parent[key]
    elif deed == "twice":
        _add(parent, key, parent[key])
    else:
        other, its_parent, its_key = _place(value, rng)
        deed = f"swapped with {other}"
        mine, theirs = (
            json.loads(json.dumps(p[k])) for p, k in ((parent, key), (its_parent, its_key))
        )
        parent[key] = theirs
        its_parent[its_key] = mine
    return f"{where}: {deed}", _text(value)


def _place(value: Any, rng: random.Random) -> tuple[str, Any, Any]:
    """A place in a value: what it is called, the object or list it lies in, and its key."""
    where, parent, key = "the whole", [value], 0
    while (children := _keys(parent[key])) and (where == "the whole" or rng.random() < 0.6):
        parent = parent[key]
        key = rng.choice(children)
        where = str(key) if where == "the whole" else f"{where}.{key}"
    return where, parent, key


def _keys(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value)
    return range(len(value)) if isinstance(value, list) else ()


def _add(parent: Any, key: Any, item: Any) -> None:
    if isinstance(parent, dict):
        parent[f"{key}_"] = item
    else:
        parent.insert(key, item)


def _nudged(value: Any, rng: random.Random) -> Any:
    """Almost the same value."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice((value + 1, value - 1, -value, 2 * value, float(value)))
    if isinstance(value, str):
        return rng.choice((f"{value}x", value[:-1], value.swapcase(), f"{value}\n", f"./{value}"))
    if isinstance(value, list):
        return rng.choice((value[:-1], value[::-1], [*value, *value[-1:]]))
    return [value] if value else {}


def _text(value: Any, hostile: str = "") -> str:
    return json.dumps(value, indent=1).replace(json.dumps(_HOLE), HOSTILE.get(hostile, ""))


def _tree_mutation(
    folder: Path, place: Path, rng: random.Random
) -> tuple[str, Callable[[Path], None]]:
    """What is done to a file or folder at `place`, and what does it to a copy of the whole."""
    other = rng.choice(sorted(folder.rglob("*"))).relative_to(folder)
    kinds: dict[str, Callable[[Path], None]] = {
        "deleted": lambda path: None,
        "an empty folder": lambda path: path.mkdir(),
        "a folder with a file": lambda path: _filled(path),
        "an empty file": lambda path: path.touch(),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a link to nothing": lambda path: path.symlink_to("nothing"),
        "a link to the folder above": lambda path: path.symlink_to(".."),
        "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "a pipe": lambda path: os.mkfifo(path),
        "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    }
    name = rng.choice((*kinds, f"a copy of {other}", "renamed", f"a copy of it as {other}_"))
    if name in kinds:
        return name, lambda copy: _replace(copy / place, kinds[name])
    if name == "renamed":
        return name, lambda copy: _rename(copy / place)
    source, target = (place, Path(f"{other}_")) if name.endswith("_") else (other, place)
    return name, lambda copy: _copy(folder / source, copy / target)


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    _remove(path)
    make(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _filled(path: Path) -> None:
    path.mkdir()
    (path / "file").write_bytes(b"{}")


def _rename(path: Path) -> None:
    path.rename(path.with_name(f"{path.name}.old"))


def _copy(source: Path, target: Path) -> None:
    _remove(target)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def _writing(place: Path, data: bytes) -> Callable[[Path], None]:
    def write(copy: Path) -> None:
        (copy / place).write_bytes(data)

    return write
