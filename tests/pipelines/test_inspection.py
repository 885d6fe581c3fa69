"""Inspection: the numbers are those of the real order, and every damage is found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from elastrata_pipelines.balance import batches_of_order
from elastrata_pipelines.deal import WorkModel
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.format.manifest import PREPARE_AGAIN_ADVICE
from elastrata_pipelines.inspection import inspect, verify
from elastrata_pipelines.order import Order
from elastrata_pipelines.storage import Storage
from support.synthetic import SEQ_LEN, write_data_set

WORK = WorkModel(linear=24 * 1024**2, quadratic=4 * 1024)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    write_data_set(tmp_path / "data", 400)
    return Storage(str(tmp_path / "data"))


def test_the_numbers_of_a_data_set(storage: Storage) -> None:
    found = inspect(
        storage, workers=3, batch_size=48, tokens_per_micro_batch=200, work=WORK, steps=8
    )
    manifest = Manifest.read(storage)
    assert (found.samples, found.tokens, found.stripes) == (400, manifest.tokens, 13)
    assert found.padding_to_seq_len == 1 - manifest.tokens / (400 * SEQ_LEN)
    assert 1 <= found.imbalance_max_over_mean <= found.balance.imbalance_worst < 1.05
    assert found.balance.imbalance_random > found.imbalance_max_over_mean
    assert found.padding_fraction < found.balance.padding_random < found.padding_to_seq_len
    dealt, by_chance, *_ = found.schemes
    assert dealt.scheme == "deal"
    assert dealt.imbalance_max_over_mean == pytest.approx(found.imbalance_max_over_mean)
    assert dealt.padding_fraction == found.padding_fraction
    assert by_chance.imbalance_max_over_mean == pytest.approx(found.balance.imbalance_random)


def test_batches_follow_the_real_order(storage: Storage) -> None:
    lengths = Manifest.read(storage).read_lengths(storage)
    order = Order(num_samples=400, stripe_size=32, window_stripes=4, seed=3)
    batches = list(batches_of_order(lengths, order, batch_size=100, steps=4))
    assert np.array_equal(np.sort(np.concatenate(batches)), np.sort(lengths))


def test_advice_names_a_batch_that_balances(storage: Storage) -> None:
    found = inspect(
        storage, workers=8, batch_size=8, tokens_per_micro_batch=200, work=WORK, steps=4
    )
    assert found.advice is not None
    assert found.advice.startswith("1 sample per worker: the slowest works ")
    words = found.advice.split()
    better = inspect(
        storage, workers=8, batch_size=int(words[words.index("batch") + 2]),
        tokens_per_micro_batch=2000, work=WORK, steps=1,
    )  # fmt: skip
    assert better.imbalance_max_over_mean < 1.02


def test_settings_that_do_not_suit_the_data(storage: Storage) -> None:
    with pytest.raises(UserError, match=r"a batch of 401 is larger than the data set \(400"):
        inspect(storage, workers=2, batch_size=401, tokens_per_micro_batch=200, work=WORK)
    with pytest.raises(UserError, match=r"its longest sample has \d+ tokens, more than the 9 of"):
        inspect(storage, workers=2, batch_size=40, tokens_per_micro_batch=9, work=WORK)


def test_a_whole_data_set_verifies(storage: Storage) -> None:
    assert verify(storage) == []


def test_every_damage_is_found(storage: Storage) -> None:
    shards = [entry.path for entry in Manifest.read(storage).shards]
    altered = bytearray(storage.read(shards[0]))
    altered[len(altered) // 2] ^= 1
    storage.write(bytes(altered), shards[0])
    storage.write(storage.read(shards[1])[:-10], shards[1])
    storage.delete(shards[2])
    size = len(storage.read(shards[1]))
    assert verify(storage) == [
        f"{storage.uri(shards[0])}: altered: its checksum is not the manifest's",
        f"{storage.uri(shards[1])}: {size} bytes, the manifest says {size + 10}",
        f"{storage.uri(shards[2])}: missing",
    ]


def test_an_index_that_does_not_match_is_found(storage: Storage, tmp_path: Path) -> None:
    np.save(tmp_path / "data" / "lengths.npy", np.ones(400, dtype=np.int32))
    found = verify(storage)
    assert len(found) == 2
    assert found[1].endswith(f"the index does not match; {PREPARE_AGAIN_ADVICE}")


def test_a_manifest_that_contradicts_itself_is_found(storage: Storage) -> None:
    raw = json.loads(storage.read("manifest.json"))
    raw["length_histogram"][5] += 1
    raw["files"] = [entry for entry in raw["files"] if entry["path"] != "shards/00002.parquet"]
    storage.write(json.dumps(raw).encode(), "manifest.json")
    with pytest.raises(UserError) as caught:
        verify(storage)
    assert [problem.split(": ", 1)[1] for problem in caught.value.problems] == [
        f"samples: 400: the length histogram counts 401; {PREPARE_AGAIN_ADVICE}",
        f"tokens: {raw['tokens']}: the length histogram counts {raw['tokens'] + 5}; "
        f"{PREPARE_AGAIN_ADVICE}",
        f"files: shards/00012.parquet: 16 samples, expected 32; {PREPARE_AGAIN_ADVICE}",
        f"samples: 400, but the shards hold 336; {PREPARE_AGAIN_ADVICE}",
        f"stripes: 13, but the shards hold 11; {PREPARE_AGAIN_ADVICE}",
    ]
