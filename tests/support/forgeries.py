"""Forgeries: parts of a history and checkpoints by hand, or under names that are not theirs."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from support.histories import started, stepped
from support.mutations import Mutation


def forgeries(run: Path, rng: random.Random) -> Iterator[Mutation]:
    """Endlessly many, drawn at random, none twice. The folder stays as it is."""
    seen = set[str]()
    while True:
        mutation = rng.choice((_copied_part, _part_by_hand, _swapped, _twice, _copied_commit))(
            run, rng
        )
        if mutation.name not in seen:
            seen.add(mutation.name)
            yield mutation


def _parts(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "history").glob("*.jsonl"))


def _name(rng: random.Random) -> str:
    attempt, writer = rng.choice((0, 1, 2, 3, 7, 100_000)), rng.choice(("", "", "d"))
    return f"{attempt:04d}-{writer}{rng.randrange(4):08d}.jsonl"


def _copied_part(run: Path, rng: random.Random) -> Mutation:
    source, target, sealed = rng.choice(_parts(run)), _name(rng), rng.random() < 0.7

    def action(copy: Path) -> None:
        lines = (copy / "history" / source).read_text(encoding="utf-8").splitlines(keepends=True)
        (copy / "history" / target).write_text(
            "".join(lines if sealed else lines[:-1]), encoding="utf-8"
        )

    seal = "" if sealed else " without its seal"
    return Mutation(f"history/{source}: a copy{seal} as {target}", action)


def _part_by_hand(run: Path, rng: random.Random) -> Mutation:
    name, step = _name(rng), rng.choice((0, 4, 8, 12))
    attempt = int(name.partition("-")[0])
    entries = [started(attempt, step), stepped(attempt, step + 1)]

    def action(copy: Path) -> None:
        (copy / "history" / name).write_text(
            "".join(json.dumps(e) + "\n" for e in entries), encoding="utf-8"
        )

    return Mutation(f"history/{name}: by hand, from step {step}", action)


def _swapped(run: Path, rng: random.Random) -> Mutation:
    one, two = rng.sample(_parts(run), 2)

    def action(copy: Path) -> None:
        texts = [(copy / "history" / name).read_bytes() for name in (one, two)]
        (copy / "history" / one).write_bytes(texts[1])
        (copy / "history" / two).write_bytes(texts[0])

    return Mutation(f"history/{one}: swapped with {two}", action)


def _twice(run: Path, rng: random.Random) -> Mutation:
    name, number = rng.choice(_parts(run)), rng.randrange(40)

    def action(copy: Path) -> None:
        path = copy / "history" / name
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        at = number % len(lines)
        path.write_text("".join([*lines[: at + 1], *lines[at:]]), encoding="utf-8")

    return Mutation(f"history/{name}: line {number}, counted round and round, twice", action)


def _copied_commit(run: Path, rng: random.Random) -> Mutation:
    source = rng.choice(sorted(path.name for path in (run / "checkpoints").iterdir()))
    step, attempt = rng.choice((0, 4, 8, 12, 16)), rng.choice((1, 2, 3, 100_000))
    target = f"{step:09d}-{attempt:04d}-{rng.randrange(16**6):06x}"

    def action(copy: Path) -> None:
        shutil.copytree(copy / "checkpoints" / source, copy / "checkpoints" / target)

    return Mutation(f"checkpoints/{source}: a copy as {target}", action)
