"""What a recipe may hold: bounds of files, of values and of sizes, each told in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from elastrata.deploy import clusters as ray_clusters
from elastrata.planner import cluster as planned
from elastrata.recipe.file import load_recipe, to_yaml
from elastrata.recipe.yaml_values import dump_yaml, parse_documents, parse_yaml
from elastrata.sweeps.config import load_sweep
from elastrata_pipelines.configured_text import MOST_CHARACTERS
from elastrata_pipelines.errors import UserError

GOOD = """\
workload: {name: bert, hidden_size: 32, num_layers: 1, num_heads: 2, max_positions: 64}
data: {path: data}
steps: 10
batch_size: 8
optimizer: {lr: 1e-3}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text(GOOD, encoding="utf-8")
    return tmp_path


def problem(name: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(name, overrides)
    (line,) = caught.value.problems
    return line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: " + "[" * 70 + "]" * 70, "x:2: more than 64 sections and lists inside one"),
        ("a: [" + "1," * 60_000 + "]", "x:1: more than 50,000 values"),
        ("a: 1\nb: &b [*b]", "x:2: the anchor 'b' contains itself"),
        ("a: 1\nb: " + "9" * 5000, "x:2: '999"),
        ("a: 1\nb: !!binary aGk=", "x:2: the tag '!!binary': expected none"),
        ("a: !!python/object/apply:os.system [exit]", "x:1: the tag '!!python/object/apply:os.s"),
        ("a: 1\nb: \x07", "x:2: not valid YAML: the character '\\x07'"),
        ('a: "\\0"', "x:1: a text with the character '\\x00'"),
        ("a: 1\n? [b]\n: 2", "x:2: not valid YAML: a key is not text"),
        ("a: {<<: 3}", "x:1: not valid YAML: <<: expected a section"),
        ("a: 1\n---\nb: 2", "x: not valid YAML: expected a single document"),
        ("a: {b: 1, b: 2}", "x:1: not valid YAML: the key 'b' is given twice"),
    ],
)
def test_yaml_that_is_not_for_us_in_one_line(text: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "x")
    (found,) = caught.value.problems
    assert found.startswith(line)
    assert len(found) < 300


def test_anchors_and_merges_are_read_and_nothing_is_shared() -> None:
    text = "a: &a {x: 1, y: [2]}\nb: {<<: *a, x: 3}\nc: *a\nd: {<<: [{x: 5}, *a]}\n"
    found = parse_yaml(text, "x")
    assert found == {
        "a": {"x": 1, "y": [2]},
        "b": {"x": 3, "y": [2]},
        "c": {"x": 1, "y": [2]},
        "d": {"x": 5, "y": [2]},
    }
    found["c"]["y"].append(0)
    assert found["a"]["y"] == found["b"]["y"] == [2]


def test_what_is_written_is_read_alike_by_both_versions_of_yaml() -> None:
    values = {"a": ["3e-4", "yes", "1:30", "0x10", "010", "~", "2026-11-21", "1_0", 1e-5, 1e20, 7]}
    dumped = dump_yaml(values)
    assert parse_yaml(dumped, "x") == parse_documents(dumped, "x")[0] == values
    assert yaml.safe_load(dumped) == values


def test_a_name_that_looks_like_a_number_survives_being_written(folder: Path) -> None:
    recipe = load_recipe("good.yaml", ['name="3e-4"'])
    (folder / "again.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    assert load_recipe("again.yaml") == recipe


def test_what_is_no_file_of_text_is_told_at_once(folder: Path) -> None:
    (folder / "folder.yaml").mkdir()
    os.mkfifo(folder / "pipe.yaml")
    (folder / "circle.yaml").symlink_to("circle.yaml")
    (folder / "zero.yaml").symlink_to("/dev/zero")
    (folder / "large.yaml").write_bytes(b"#" * (2**20 + 1))
    told = {name: problem(f"{name}.yaml") for name in ("folder", "pipe", "circle", "zero", "large")}
    assert told == {
        "folder": "folder.yaml: a folder, expected a file",
        "pipe": "pipe.yaml: a device, pipe or socket, expected a file",
        "circle": "circle.yaml: cannot be read (a link that leads back to itself)",
        "zero": "zero.yaml: a device, pipe or socket, expected a file",
        "large": "large.yaml: 1,048,577 bytes, expected at most 1,048,576",
    }
    (folder / "top.yaml").write_text("extends: pipe.yaml\n", encoding="utf-8")
    assert problem("top.yaml") == told["pipe"]
    for read in (load_sweep, planned.read_cluster, ray_clusters.read_cluster):
        with pytest.raises(UserError) as caught:
            read("pipe.yaml")
        assert caught.value.problems == (told["pipe"],)
    assert problem("x" * 5000 + ".yaml").endswith("no such recipe file")


def test_recipes_that_extend_one_another_are_counted(folder: Path) -> None:
    for number in range(40):
        (folder / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n", encoding="utf-8")
    (folder / "40.yaml").write_text("extends: good.yaml\n", encoding="utf-8")
    assert load_recipe("20.yaml").steps == 10
    assert "extends: more than 32 recipes extend one another" in problem("0.yaml")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("workload.num_layers=2147483648", "above 0 and at most 10,000"),
        ("workload={name: bert, hidden_size: 1048576, num_layers: 9999, num_heads: 16}", "weights"),
        ("batch_size=99999999", "above 0 and at most 16,777,216"),
        ("parallel.tensor=1000000", "above 0 and at most 100,000"),
        ("workers.hang_seconds=.inf", "workers.hang_seconds: .inf: expected a number above 0"),
        ("checkpoint.grace_seconds=.nan", "checkpoint.grace_seconds: .nan: expected a number abov"),
        ("clip.max_norm=.inf", "clip.max_norm: .inf: expected a number above 0"),
        (f"data.path={'x' * 5000}", f"expected a text of at most {MOST_CHARACTERS:,}"),
        ("name=../elsewhere", "name: '../elsewhere': expected letters, digits"),
        (f"phases=[{'{steps: 1},' * 1001}]", "expected a list, each item a section"),
        ("optimizer.betas.²=0.5", "expected a place in the list, 0 to 1"),
        ("nxt=true", "nxt: true: unknown key"),
    ],
)
def test_a_size_beyond_all_reason_in_one_line(folder: Path, override: str, line: str) -> None:
    sized = "optimizer={lr: 1e-3, betas: [0.9, 0.99]}"
    found = problem("good.yaml", sized, override)
    assert line in found
    assert len(found) < 400


def test_many_mistakes_are_told_in_part(folder: Path) -> None:
    (folder / "many.yaml").write_text(
        GOOD + "".join(f"key{n}: {n}\n" for n in range(500)), encoding="utf-8"
    )
    with pytest.raises(UserError) as caught:
        load_recipe("many.yaml")
    assert len(caught.value.problems) == 51
    assert caught.value.problems[-1] == "many.yaml: and 450 more mistakes"
