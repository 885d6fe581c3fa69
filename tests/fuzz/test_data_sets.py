"""Damaged data sets and files of masks: each is refused in lines that name the file, or read as it
was. Never a raw exception, a hang, or other data without a word."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from elastrata.recipe.recipe import Recipe
from elastrata.sparsity.mask_file import MASKS_FILE, pack_masks
from elastrata.trainer.preflight import TrainingData, find_training_data
from elastrata_pipelines.batches import Batches, Start
from elastrata_pipelines.deal import WorkModel
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import HELD_OUT, MANIFEST, Manifest, read_stripes
from elastrata_pipelines.inspection import inspect, verify
from elastrata_pipelines.payload import decode
from elastrata_pipelines.storage import Storage
from support.mutations import Mutation, mutated, mutated_json, mutations, quick, seeds
from support.synthetic import Sizes, tiny_recipe, write_data_set
from support.verdict import read_or_refused

SHAPES = {"blocks.0.query": (8, 12), "blocks.0.up": (16, 8), "blocks.1.query": (3, 5)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of three shards, with pairs, and one held out of it."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    sizes = Sizes(seq_len=12, stripe=8, stripes_per_shard=2)
    write_data_set(folder, samples=37, held_out=13, pairs=True, sizes=sizes)
    return folder


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    folder.mkdir()
    rng = torch.Generator().manual_seed(0)
    made = {name: torch.rand(shape, generator=rng) < 0.5 for name, shape in SHAPES.items()}
    (folder / MASKS_FILE).write_bytes(pack_masks(made))
    return folder


def trained_on(folder: Path) -> dict[str, Any]:
    """All that a run would see: what the preflight finds, and every sample."""
    found = find_training_data(Recipe.model_validate(_recipe(folder)))
    return {
        "fingerprint": found.data_sets[0].fingerprint,
        "histogram": found.length_histogram,
        "vocabulary": found.vocabulary,
        "parts": [_tables(batches) for batches in _parts(found)],
    }


def verified(folder: Path) -> dict[str, Any]:
    """All that `inspect --verify` vouches for."""
    storage = Storage(str(folder))
    if problems := verify(storage):
        raise UserError(*problems)
    manifest = Manifest.read(storage)
    lengths = [manifest.read_lengths(storage).tolist()]
    if manifest.held_out:
        inner = storage.sub(HELD_OUT)
        lengths.append(Manifest.read(inner).read_lengths(inner).tolist())
    shown = inspect(
        storage,
        workers=2,
        batch_size=8,
        tokens_per_micro_batch=64,
        work=WorkModel(linear=1, quadratic=1),
        steps=2,
    )
    listed = {entry.path: (folder / entry.path).read_bytes() for entry in manifest.files}
    return {"manifest": manifest, "lengths": lengths, "shown": shown, "bytes": listed}


def _recipe(folder: Path) -> dict[str, Any]:
    return tiny_recipe(folder, "runs", batch_size=8, micro_batch_tokens=64)


def _parts(found: TrainingData) -> list[Batches]:
    return [found.train, *(part for part in found.held_out if part)]


def _tables(batches: Batches) -> list[pa.Table]:
    """Every stripe; and the batches of two steps can be made of them."""
    manifest = batches.manifest
    for group in batches.groups(Start(), steps=2, batch_size=8, max_tokens=1000):
        for payload in batches.payloads(group, 2):
            assert all(len(step.rows) for step in decode(payload, manifest.token_dtype))
    return read_stripes(Storage(batches.url), manifest, range(manifest.stripes))


READERS: tuple[Callable[[Path], dict[str, Any]], ...] = (trained_on, verified)


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("read", READERS)
def test_a_damaged_data_set_is_refused_or_read_as_it_was(
    data: Path, read: Callable[[Path], dict[str, Any]], seed: int
) -> None:
    whole = read(data)
    refused = 0
    for mutation in islice(mutations(data, random.Random(seed)), quick(150)):
        case = f"seed {seed}: {mutation.name}"
        with mutated(data, mutation) as copy:
            found = read_or_refused(partial(read, copy), case, str(copy))
        refused += found is None
        if found is not None:
            for what, value in whole.items():
                assert found[what] == value, f"{case}: other {what}"
    assert refused > quick(60)


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("held_out", [False, True])
def test_any_manifest_with_its_checksum_is_refused_or_used(
    data: Path, held_out: bool, seed: int
) -> None:
    """Whoever alters a manifest and its checksum gets no raw exception either."""
    manifest = (data / HELD_OUT / MANIFEST if held_out else data / MANIFEST).read_bytes()
    rng, refused = random.Random(seed), 0
    for _ in range(quick(100)):
        altered = mutated_json(manifest, rng)
        assert altered is not None
        name, text = altered
        place = Mutation(name, partial(_put_manifest, held_out=held_out, text=text))
        with mutated(data, place) as copy:
            refused += _used(copy, f"seed {seed}: {name}") is None
    assert refused > quick(50)


def _used(folder: Path, case: str) -> dict[str, Any] | None:
    """What both readers make of a folder."""
    fields = ("batch_size: ", "micro_batch_tokens: ", "workload", "data.path")
    found = [read_or_refused(partial(read, folder), case, str(folder), *fields) for read in READERS]
    return None if None in found else found[0]


def _put_manifest(copy: Path, *, held_out: bool, text: bytes) -> None:
    """Puts a manifest in place, and makes every checksum fit it."""
    text = sealed(text)
    if not held_out:
        (copy / MANIFEST).write_bytes(text)
        return
    (copy / HELD_OUT / MANIFEST).write_bytes(text)
    try:
        checksum = json.loads(text)["checksum"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return
    outer = json.loads((copy / MANIFEST).read_bytes())
    (copy / MANIFEST).write_bytes(sealed(json.dumps({**outer, "held_out": checksum}).encode()))


def sealed(text: bytes) -> bytes:
    """A manifest with the checksum of what it says, where it is JSON at all."""
    try:
        values = json.loads(text)
        values.pop("checksum", None)
        canonical = json.dumps(values, indent=1, sort_keys=True)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return text
    checksum = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps({**values, "checksum": checksum}).encode()
