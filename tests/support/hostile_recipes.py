"""Hostile recipes: seeded mistakes in sound recipes, in their values and in their bytes."""

from __future__ import annotations

import copy
import os
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from elastrata.recipe.json_schema import recipe_schema
from elastrata.recipe.yaml_reader import available_recipes
from elastrata.recipe.yaml_values import dump_yaml, parse_yaml

RECIPE = "hostile.yaml"
_KEYS_OF_A_PATH = 12
_ODD = "\u202e\u2028\u00e9\U0001f600\u0130\ufeff\u00b2\u0663"
_NUMBERS = (0, -1, 1, 2, 7, 2**31, 2**53, 2**63, -(2**63), 10**19, 0.5, 1e-320, 1e308, -1e308)
_HOSTILE = (
    *_NUMBERS,
    *(float("nan"), float("inf"), float("-inf"), True, False, None, "", " ", "auto", "null", "1"),
    *("3e-4", "yes", "0x10", "1:30", "2026-11-21", "..", "a/../../b", "/etc/hostname", "x" * 5000),
    *("a\nb", "tab\there", _ODD, "foo://bar", "memory://data", "a::b", "[", "*.query", "bert"),
    *([], {}, [[]], [1, 2, 3], ["a"], {"a": 1}, {"": {}}, {"name": "lamb"}, {"1.5": None}),
)  # fmt: skip
_TEXTS = (
    *("9" * 5000, "1" + "e9" * 3, "0x" + "f" * 300, "-0", "1_000_000", "+1", ".5", "1e400"),
    *('"\\0"', '"\\uD800"', '"\\UFFFFFFFF"', '"\\x1b[31m"', "!!binary aGk=", "!!set {a}"),
    *("!!python/object/apply:os.system [exit]", "!!int abc", "!!timestamp 2026-11-21"),
    *("*nobody", "&a *a", "&a [*a]", "{? [a]: 1}", "{<<: 1}", "{<<: [1]}", "'", '"', "|", ">-"),
    *("[" * 100 + "]" * 100, "[" * 3000, "{a: " * 100 + "1" + "}" * 100, "- - -", "---"),
)  # fmt: skip


@dataclass
class Hostile:
    """One case: files to write, and what to load."""

    text: bytes
    """Of the recipe's file."""
    overrides: list[str] = field(default_factory=list)
    name: str = RECIPE
    """What is loaded."""


def hostile_recipes(seed: int, count: int) -> Iterator[Hostile]:
    """As many cases; the same seed gives the same ones."""
    rng = random.Random(seed)
    bases, schema = _bases(), _schema()
    for _ in range(count):
        yield _hostile(rng, bases, schema)


def write_neighbours(folder: Path) -> None:
    """The files that hostile recipes extend: sound ones, links in a circle, pipes, a long chain."""
    (folder / "sound.yaml").write_text(dump_yaml(_SMALL), encoding="utf-8")
    (folder / "itself.yaml").write_text("extends: itself.yaml\n", encoding="utf-8")
    (folder / "empty.yaml").write_text("", encoding="utf-8")
    (folder / "latin.yaml").write_bytes(b"name: \xe9\n")
    (folder / "large.yaml").write_bytes(b"#" * 2**21)
    (folder / "folder.yaml").mkdir()
    os.mkfifo(folder / "pipe.yaml")
    (folder / "circle.yaml").symlink_to("circle.yaml")
    (folder / "zero.yaml").symlink_to("/dev/zero")
    for number in range(50):
        (folder / f"chain-{number}.yaml").write_text(
            f"extends: chain-{number + 1}.yaml\n", encoding="utf-8"
        )
    (folder / "chain-50.yaml").write_text("extends: sound.yaml\n", encoding="utf-8")


def bomb(levels: int, width: int, kind: str) -> str:
    """A few lines that stand for `width` to the power of `levels` values.

    Args:
        levels: of anchors, each of which uses the one before.
        width: how often it does.
        kind: `list`, `map` or `merge`.
    """
    lines = [f"a0: &a0 {'{x: 1}' if kind == 'merge' else '[1]'}"]
    for level in range(1, levels):
        uses = [f"*a{level - 1}"] * width
        if kind == "list":
            made = f"[{', '.join(uses)}]"
        elif kind == "map":
            made = "{" + ", ".join(f"k{n}: {use}" for n, use in enumerate(uses)) + "}"
        else:
            made = "{<<: [" + ", ".join(uses) + "]}"
        lines.append(f"a{level}: &a{level} {made}")
    return "\n".join(lines) + "\n"


_SMALL: dict[str, Any] = {
    "workload": {"name": "bert", "hidden_size": 32, "num_layers": 2, "num_heads": 2},
    "data": {
        "path": "data",
        "prepare": {
            "sources": [{"paths": ["text"]}],
            "tokenizer": {"train": "wordpiece", "vocab_size": 400},
            "seq_len": 32,
        },
    },
    "steps": 10,
    "batch_size": 8,
    "optimizer": {"lr": 1e-3},
}
_PHASES = {
    **_SMALL,
    "workload": {"name": "gpt", "hidden_size": 32, "num_layers": 2, "num_heads": 2},
    "sparsity": {"method": "rigl", "level": 0.5},
    "phases": [{"steps": 5}, {"steps": 3, "sparsity": None, "optimizer": {"lr": 1e-4}}],
    "schedule": {"shape": "polynomial", "power": 0.5, "warmup_steps": 2},
    "batch_size": 16,
}
_EVERYTHING = {
    **_SMALL,
    "optimizer": {"name": "lamb", "lr": 1e-3, "trust_max": 2},
    "parallel": {"tensor": 2, "sequence": True, "pipeline": 2, "micro_batches": 4},
    "workers": {"min": 4, "max": 8, "hang_seconds": 30, "threads": 1},
    "evaluation": {"every_samples": 40, "samples": 10},
    "target": {"metric": "eval/loss", "at_most": 2.5},
    "batch_size_warmup": {"start": 4, "steps": 5},
    "clip": {"method": "bucketwise", "max_norm": 1.0},
    "checkpoint": {"every": 5},
    "tracking": {"uri": None},
}


_schema = lru_cache(recipe_schema)


@lru_cache
def _bases() -> list[dict[str, Any]]:
    shipped = [
        parse_yaml(path.read_text(encoding="utf-8"), name)
        for name, path in sorted(available_recipes().items())
    ]
    whole = [recipe for recipe in shipped if "extends" not in recipe]
    variants = [{"extends": name} for name in ("bert/tiny", "bert/lamb", "gpt/sparse-tiny")]
    return [_SMALL] * 4 + [_PHASES] * 3 + [_EVERYTHING] * 3 + whole + variants


def _hostile(rng: random.Random, bases: list[dict[str, Any]], schema: dict[str, Any]) -> Hostile:
    values = copy.deepcopy(rng.choice(bases))
    kind = rng.random()
    if kind < 0.45:
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            rng.choice((_replace, _replace, _grow, _drop, _misspell, _nest, *[_by_schema] * 4))(
                rng, values, schema
            )
        return Hostile(_written(values))
    if kind < 0.65:
        count = rng.choice((1, 1, 2, 3))
        return Hostile(_written(values), [_override(rng, values, schema) for _ in range(count)])
    if kind < 0.75:
        return _extending(rng, values)
    if kind < 0.9:
        return Hostile(_mistyped(rng, dump_yaml(values)).encode("utf-8", "surrogatepass"))
    return Hostile(_damaged(rng, dump_yaml(values).encode()))


def _written(values: Any) -> bytes:
    return dump_yaml(values).encode("utf-8", "surrogatepass")


def _places(values: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items: Any = values.items() if isinstance(values, dict) else enumerate(values)
    found = []
    for key, value in items:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += _places(value, (*path, key))
    return found


def _at(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def _value(rng: random.Random) -> Any:
    drawn = rng.random()
    if drawn < 0.1:
        return rng.choice((-1, 1)) * 10 ** rng.randrange(19)
    if drawn < 0.2:
        return rng.uniform(-2, 2)
    if drawn < 0.25:
        return "".join(rng.choices(string.printable[:95] + _ODD, k=rng.randrange(12)))
    return copy.deepcopy(rng.choice(_HOSTILE))


def _replace(rng: random.Random, values: Any, schema: Any) -> None:
    if places := _places(values):
        *parent, key = rng.choice(places)
        _at(values, tuple(parent))[key] = _value(rng)


def _grow(rng: random.Random, values: Any, schema: Any) -> None:
    """A list of many equal items, or a section of many keys."""
    if places := _places(values):
        *parent, key = rng.choice(places)
        item = _at(values, (*parent, key))
        count = rng.choice((2,) * 6 + (50,) * 3 + (1200,))
        many = [copy.deepcopy(item) for _ in range(count)]
        _at(values, tuple(parent))[key] = rng.choice(
            (many, {f"key{number}": 1 for number in range(count)})
        )


def _drop(rng: random.Random, values: Any, schema: Any) -> None:
    if places := _places(values):
        *parent, key = rng.choice(places)
        del _at(values, tuple(parent))[key]


def _misspell(rng: random.Random, values: Any, schema: Any) -> None:
    sections = [(), *(path for path in _places(values) if isinstance(_at(values, path), dict))]
    section = _at(values, rng.choice(sections))
    known = rng.choice([*section, "steps", "lr", "hidden_size"])
    place = rng.randrange(len(known) + 1)
    section[known[:place] + rng.choice("xyz_.\n\x07é") + known[place:]] = _value(rng)


def _nest(rng: random.Random, values: Any, schema: Any) -> None:
    if places := _places(values):
        *parent, key = rng.choice(places)
        value = _at(values, (*parent, key))
        for _ in range(rng.choice((1, 3, 30, 62, 80))):
            value = rng.choice(([value], {"name": value}, {"phases": [value]}))
        _at(values, tuple(parent))[key] = value


def _by_schema(rng: random.Random, values: Any, schema: Any) -> None:
    """Sets a key that the schema knows, to a value that its type allows, or nearly."""
    path, value = _drawn_key(rng, schema)
    for key in path[:-1]:
        below = values.get(key)
        values[key] = values = below if isinstance(below, dict) else {}
    values[path[-1]] = value


def _drawn_key(rng: random.Random, schema: dict[str, Any]) -> tuple[list[str], Any]:
    at, path = schema["$defs"]["Recipe"], list[str]()
    while len(path) < _KEYS_OF_A_PATH:
        options = [_resolved(option, schema) for option in at.get("anyOf", at.get("oneOf", [at]))]
        at = rng.choice(options)
        if "properties" not in at:
            break
        key = rng.choice(sorted(at["properties"]))
        path.append(key)
        at = _resolved(at["properties"][key], schema)
    return path, _typed(rng, at)


def _resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return schema


def _typed(rng: random.Random, schema: dict[str, Any]) -> Any:
    """A value of the schema's type, often at one of its bounds or just beyond."""
    if "enum" in schema or "const" in schema:
        return rng.choice(schema.get("enum", [schema.get("const")]))
    bounds = [schema[key] for key in schema if "imum" in key.lower()]
    match schema.get("type"):
        case "integer":
            return rng.choice([1, 2, 3, 4, 8, 8, 64, *(b + d for b in bounds for d in (-1, 0, 1))])
        case "number":
            return rng.choice([0.1, 0.5, 1, 2.5, 1e-6, *bounds])
        case "boolean":
            return rng.choice((True, False))
        case "string":
            return rng.choice(("a", "data", "x" * 99))
        case "null":
            return None
    return _value(rng)


def _override(rng: random.Random, values: Any, schema: Any) -> str:
    drawn = rng.random()
    raw = rng.choice(_TEXTS) if rng.random() < 0.3 else _inline(_value(rng))
    if drawn < 0.5:
        path, value = _drawn_key(rng, schema)
        return f"{'.'.join(path)}={raw if rng.random() < 0.3 else _inline(value)}"
    if drawn < 0.8 and (places := _places(values)):
        return f"{'.'.join(map(str, rng.choice(places)))}={raw}"
    odd = ("", ".", "a..b", "=", "steps", "steps.x=1", ".".join("a" * 200) + "=1")
    return rng.choice((*odd, "extends=bert/tiny", "phases.0.steps=1", "\n=1", f"{_ODD}=2", "a\0=1"))


def _inline(value: Any) -> str:
    shown = dump_yaml([value]).removeprefix("- ").strip()
    return shown if "\n" not in shown else repr(value)


def _extending(rng: random.Random, values: dict[str, Any]) -> Hostile:
    neighbours = "sound itself empty latin large folder pipe circle zero chain-0 chain-30 nobody"
    files = [f"{name}.yaml" for name in neighbours.split()]
    names = ["bert/tiny", "gpt/tiny", "bert/nothing", "", "..", "/", "a\0b", "x" * 5000]
    odd = ["a\0b.yaml", "/dev/zero", "/proc/self/mem.yaml", [1], {"a": 1}, 3, True]
    base: Any = rng.choice([*files, *names, *odd])
    kept = {key: value for key, value in values.items() if rng.random() < 0.3}
    text = dump_yaml({**kept, "extends": base})
    if isinstance(base, str) and rng.random() < 0.2:
        return Hostile(text.encode(), name=base or "''")
    return Hostile(text.encode("utf-8", "surrogatepass"))


def _mistyped(rng: random.Random, text: str) -> str:
    """A recipe as nobody would type it: duplicates, tags, anchors, bombs, odd numbers."""
    lines = text.splitlines()
    place = rng.randrange(len(lines))
    key, odd = lines[place].split(":")[0], rng.choice(_TEXTS)
    kind = rng.choice(("list", "map", "merge"))
    return rng.choice(
        (
            "\n".join([*lines[: place + 1], *lines[place:]]),
            text + bomb(rng.choice((3, 6, 20, 60)), 10, kind),
            text + f"extra: {odd}\n",
            "\n".join([*lines[:place], f"{key}: {odd}", *lines[place + 1 :]]),
            text.replace(": ", rng.choice((":", ":\t", ": &a ", ": !x ", ": ? ", " : : ")), 3),
            "<<: {steps: 3}\n" + text,
            "---\n" + text + "---\n" + text,
            text.upper(),
        )
    )


def _damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes turned, left out, put in or repeated."""
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(data) + 1)
        end = min(len(data), place + rng.choice((1, 1, 4, 40)))
        turned, again = bytes([rng.randrange(256)]), data[place:end] * 2
        put = rng.choice((b"", turned, rng.randbytes(5), again, b"\r", b"\t", b"\xff\xfe"))
        data = data[:place] + put + data[end:]
    return data
