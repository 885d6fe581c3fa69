"""Hostile recipes: seeded mistakes in sound recipes, in their values and in their bytes."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastrata.recipe.yaml_values import dump_yaml
from support.mutations import HOSTILE, mutated_bytes

RECIPE = "hostile.yaml"
_VALUES = [
    json.loads(text) for name, text in HOSTILE.items() if not name.startswith(("deep", "5,000"))
]
_TEXTS = (
    *("9" * 5000, "0x" + "f" * 300, "-0", "1_000_000", ".5", "1e400", '"\\0"', '"\\uD800"'),
    *("!!binary aGk=", "!!python/object/apply:os.system [exit]", "!!set {a}", "!!int abc"),
    *("*unknown", "&a [*a]", "{? [a]: 1}", "{<<: 1}", "'", "|", "@", "[" * 3000, "%YAML 9.9"),
)
_BASES = (
    *(f"{name}.yaml" for name in ("sound", "itself", "empty", "latin", "large", "folder", "pipe")),
    *("circle.yaml", "zero.yaml", "chain-0.yaml", "chain-30.yaml", "bert/tiny", "bert/nothing"),
    *("", "/", "a\0b", "x" * 5000, "/dev/zero", [1], {"a": 1}, 3, True),
)


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
    for _ in range(count):
        values = copy.deepcopy(rng.choice((_SMALL, _PHASES, _EVERYTHING)))
        kind = rng.choice(("value", "value", "override", "extends", "text", "bytes"))
        if kind == "value":
            _alter(rng, values)
        elif kind == "extends":
            kept = {key: value for key, value in values.items() if rng.random() < 0.3}
            values = {**kept, "extends": rng.choice(_BASES)}
        text = dump_yaml(values).encode("utf-8", "surrogatepass")
        if kind == "text":
            text = _mistyped(rng, text.decode()).encode("utf-8", "surrogatepass")
        elif kind == "bytes":
            text = mutated_bytes(text, rng)[1]
        overrides = [_override(rng, values) for _ in range(rng.choice((1, 2)))]
        yield Hostile(text, overrides if kind == "override" else [])


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


def _places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*path, key))


def _alter(rng: random.Random, values: Any) -> None:
    """Replaces, misspells, repeats or removes what stands at one place."""
    *parent, key = rng.choice(list(_places(values)))
    section = values
    for part in parent:
        section = section[part]
    old = section.pop(key)
    match rng.choice(("replace", "replace", "remove", "misspell", "repeat")):
        case "replace" if isinstance(section, dict):
            section[key] = rng.choice(_VALUES)
        case "misspell" if isinstance(section, dict):
            section[key + "x"] = old
        case "repeat" if isinstance(section, dict):
            section[key] = [old] * rng.choice((2, 50, 1200))


def _override(rng: random.Random, values: Any) -> str:
    path = ".".join(map(str, rng.choice(list(_places(values)))))
    value = rng.choice((*_TEXTS, *map(json.dumps, _VALUES)))
    return rng.choice((f"{path}={value}", f"{path}.x={value}", path, f"={value}"))


def _mistyped(rng: random.Random, text: str) -> str:
    """YAML with keys given twice, tags, anchors, bombs and odd numbers."""
    lines = text.splitlines()
    place = rng.randrange(len(lines))
    return rng.choice(
        (
            "\n".join([*lines[: place + 1], *lines[place:]]),
            text + bomb(rng.choice((3, 6, 20)), 10, rng.choice(("list", "map", "merge"))),
            text + f"extra: {rng.choice(_TEXTS)}\n",
            text.replace("steps: ", f"steps: {rng.choice(_TEXTS)} # "),
            text.replace(": ", rng.choice((":", ":\t", ": &a ", ": !x ", " : : ")), 3),
            "<<: {steps: 3}\n" + text,
            "---\n" + text + "---\n" + text,
            text.upper(),
            text + "".join(f"key{n}: {n}\n" for n in range(500)),
        )
    )
