"""Hashes of single values, and of long texts in blocks, are those of arrays and of whole texts."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastrata_pipelines.hashing import (
    combine,
    combine_one,
    mix,
    mix_one,
    text_hash,
    uniform,
    uniform_one,
    utf8_size,
)

numbers = st.integers(0, 2**64 - 1)


@given(numbers, numbers)
def test_one_value_is_hashed_as_in_an_array(one: int, other: int) -> None:
    array = np.array([one], dtype=np.uint64)
    assert [mix_one(one)] == mix(array).tolist()
    assert [combine_one(one, other)] == combine(array, np.uint64(other)).tolist()
    assert [uniform_one(one)] == uniform(array).tolist()


def test_a_long_text_is_hashed_as_a_whole() -> None:
    for text in ("", "ä", "long " * 300_000, "länger \U0001f600" * 300_000):
        data = text.encode()
        whole = hashlib.blake2b(len(data).to_bytes(8, "little") + data, digest_size=8).digest()
        assert text_hash(text) == text_hash(data) == int.from_bytes(whole, "little")
        assert utf8_size(text) == len(data)
