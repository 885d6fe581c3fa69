"""Histograms of lengths from files, and the quartiles of what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrata.bench.lengths import choose_lengths, read_histogram
from elastrata.bench.measurement import quartiles
from elastrata_pipelines.errors import UserError
from support.synthetic import write_data_set


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=30), st.randoms())
def test_quartiles_are_in_order_and_know_no_order(values, random) -> None:
    found = quartiles(values)
    shuffled = list(values)
    random.shuffle(shuffled)
    assert quartiles(shuffled) == found
    assert min(values) <= found.lower <= found.median <= found.upper <= max(values)


def test_quartiles_of_five() -> None:
    found = quartiles([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.lower, found.median, found.upper) == (2, 3, 4)


@pytest.mark.parametrize(
    ("content", "histogram"),
    [
        ({"counts": [0, 4, 1, 0]}, (0, 0, 4, 1)),
        ({"source": "mine", "counts": [7]}, (0, 7)),
        ({"length_histogram": [0, 4, 1]}, (0, 4, 1)),
    ],
)
def test_files_of_both_forms(content, histogram, tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert read_histogram(str(path)) == histogram
    chosen = choose_lengths(str(path), seq_len=9, prepared=True)
    assert (chosen.name, chosen.histogram) == ("lengths.json", histogram)


def test_a_manifest_is_such_a_file(tmp_path: Path) -> None:
    manifest = write_data_set(tmp_path, samples=100)
    found = read_histogram(str(tmp_path / "manifest.json"))
    assert found == manifest.length_histogram[: len(found)]
    assert sum(found) == 100


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not valid JSON"),
        ("[1, 2]", "expected an object with a list 'counts'"),
        ('{"count": [1]}', "expected an object with a list 'counts'"),
        ('{"counts": 3}', "counts: expected a list of numbers of samples"),
        ('{"counts": [1, -2]}', "counts: -2 samples of length 2: expected whole numbers"),
        ('{"counts": [1.5]}', "counts: 1.5 samples of length 1: expected whole numbers"),
        ('{"counts": [true]}', "counts: true samples of length 1: expected whole numbers"),
        ('{"counts": []}', "counts: expected at least one sample, and none of length 0"),
        ('{"length_histogram": [0, 0]}', "expected at least one sample, and none of length 0"),
        ('{"length_histogram": [3, 1]}', "expected at least one sample, and none of length 0"),
    ],
)
def test_a_bad_histogram_is_told_in_one_line(content, problem, tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_histogram(str(path))
    (line,) = caught.value.problems
    assert line.startswith(f"--lengths: {path}: ")
    assert problem in line


def test_a_name_that_is_none_gets_a_hint() -> None:
    with pytest.raises(UserError, match=r"ful: expected data, full or a JSON file \(did you mean"):
        choose_lengths("ful", seq_len=9, prepared=True)


@pytest.mark.parametrize(("prepared", "name"), [(True, "data"), (False, "full")])
def test_the_default(prepared: bool, name: str) -> None:
    chosen = choose_lengths(None, seq_len=3, prepared=prepared)
    assert (chosen.name, chosen.histogram) == (name, None if prepared else (0, 0, 0, 1))
