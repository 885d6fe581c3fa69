"""The parts of sparsity: levels, hashes, the smallest of many, RigL, files of masks, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from elastrata.cli.main import run as run_here
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.sparsity import rigl
from elastrata.sparsity.config import AnySparsity, SparsityConfig
from elastrata.sparsity.layers import erdos_renyi, layer_levels, sparsity_plan
from elastrata.sparsity.mask_file import pack_masks, read_masks
from elastrata.sparsity.rigl import element_hashes
from elastrata.trainer.preflight import mask_problems
from elastrata_pipelines.deal import WorkModel
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.hashing import combine
from elastrata_workloads.gpt.workload import Gpt
from support.command import run
from support.ranks import run_ranks
from support.sparse_ranks import smallest_on_ranks, updated_on_ranks
from support.synthetic import tiny_recipe, write_data_set

SHAPES = {f"blocks.{n}.{name}": shape for n in (0, 1) for name, shape in
          {"query": (8, 8), "up": (32, 8), "down": (8, 32)}.items()}  # fmt: skip


def _config(**keys: Any) -> AnySparsity:
    config: AnySparsity = TypeAdapter(SparsityConfig).validate_python(keys)
    return config


def test_hashes_are_those_of_the_pipelines() -> None:
    elements = np.concatenate([np.arange(1000), 2**32 + np.arange(1000), [2**62]])
    for key in (0, 1, 2**63, 2**64 - 1):
        found = element_hashes(key, torch.from_numpy(elements)).numpy().view(np.uint64)
        assert np.array_equal(found, combine(key, elements.astype(np.uint64)))


@given(level=st.floats(0, 0.99), sizes=st.lists(st.integers(1, 300), min_size=2, max_size=12))
def test_erdos_renyi_spreads_the_whole_level(level: float, sizes: list[int]) -> None:
    shapes = {str(n): (m, k) for n, (m, k) in enumerate(zip(sizes, sizes[::-1], strict=True))}
    levels = erdos_renyi(shapes, level)
    weights = {name: m * k for name, (m, k) in shapes.items()}
    kept = {name: (1 - levels[name]) * weights[name] for name in shapes}
    assert all(-1e-9 <= levels[name] < 1 for name in shapes)
    assert sum(kept.values()) == pytest.approx((1 - level) * sum(weights.values()))
    ratios = [kept[name] / sum(shapes[name]) for name in shapes if levels[name] > 1e-9]
    assert all(ratio == pytest.approx(ratios[0]) for ratio in ratios)


def test_layers_may_have_levels_of_their_own() -> None:
    own = [{"layers": ["*.up"], "level": 0.5}, {"layers": ["blocks.1.*"], "level": 0.25}]
    config = _config(level=0.9, layers=["*.query", "*.up"], levels=own)
    assert layer_levels(config, SHAPES) == {
        "blocks.0.query": 0.9,
        "blocks.0.up": 0.5,
        "blocks.1.query": 0.25,
        "blocks.1.up": 0.25,
    }


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1, 2, 3]))
def test_the_smallest_keys_are_found_over_shards(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    shapes, dims = [(5, 7), (2, 9), (1, 1), (4, 4)], [0, 1, 0, -1]
    keys = [
        rng.integers(2**64, size=shape, dtype=np.uint64)  # all different
        if seed % 2
        else rng.permutation(shape[0] * shape[1]).reshape(shape).astype(np.uint64)
        for shape in shapes
    ]
    counts = [int(rng.integers(0, key.size + 1)) for key in keys]
    wanted = [np.argsort(np.argsort(key.ravel())).reshape(key.shape) < count
              for key, count in zip(keys, counts, strict=True)]  # fmt: skip
    signed = [key.view(np.int64) for key in keys]
    for found in run_ranks(size, smallest_on_ranks, signed, counts, dims):
        for one, other in zip(found, wanted, strict=True):
            assert np.array_equal(one, other)


def _replaced(weights: Any, gradient: Any, mask: Any, count: int) -> Any:
    """RigL's update by sorting; of equal ones the first in the matrix."""
    order = range(weights.size)
    kept = sorted((i for i in order if not mask.flat[i]), key=lambda i: (abs(weights.flat[i]), i))
    zero = set(kept[:count]) | {i for i in order if mask.flat[i]}
    coming = sorted(zero, key=lambda i: (-abs(gradient.flat[i]), i))[:count]
    return np.array([i in zero and i not in coming for i in order]).reshape(mask.shape)


def test_the_smallest_keys_are_the_same_where_none_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where keys that are out are marked."""
    generator = torch.Generator().manual_seed(0)
    shapes, counts = [(3, 5), (40, 30), (1, 1), (0, 4), (16, 16)], [4, 600, 1, 0, 0]
    keys = [torch.randint(-(2**63), 2**63 - 1, shape, generator=generator) for shape in shapes]
    dropped = rigl.smallest(keys, keys, counts)
    monkeypatch.setattr(rigl.Remaining, "of", lambda keys: rigl.MarkedRemaining(keys.flatten()))
    marked = rigl.smallest(keys, keys, counts)
    assert [int(chosen.sum()) for chosen in marked] == counts
    for first, second in zip(dropped, marked, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rigl_replaces_the_same_weights_on_any_number_of_ranks(size: int) -> None:
    rng = np.random.default_rng(1)
    shape = (7, 5)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        mask = rng.random(shape) < 0.6
        # few different values: ties are decided by the place
        weights = np.where(mask, 0, rng.integers(-3, 4, shape)).astype(np.float32)
        gradient = rng.integers(-2, 3, shape).astype(np.float32)
        count = int(rng.integers(0, (~mask).sum() + 1))
        wanted = _replaced(weights, gradient, mask, count)
        assert wanted.sum() == mask.sum()
        for found in run_ranks(size, updated_on_ranks, weights, gradient, mask, count):
            assert np.array_equal(found, wanted)


def test_a_gpt3_xl_at_three_quarters_needs_two_and_a_half_times_fewer_flops() -> None:
    """SPDF (arXiv 2303.10464) says 2.5; it counts attention in full, we halve what is causal."""
    recipe = load_recipe("gpt/sparse-1.3b")
    assert isinstance(recipe.workload, Gpt)
    vocabulary = Vocabulary(size=50257, pad_id=0, mask_id=None, special_ids=(), continuation_ids=())
    shape = recipe.workload.shape(vocabulary.size)
    shapes = {f"blocks.{n}.{name}": sizes for n in range(shape.num_layers) for name, sizes in {
        **dict.fromkeys(("query", "key", "value", "output"), (2048, 2048)),
        "up": (8192, 2048), "down": (2048, 8192)}.items()}  # fmt: skip
    ours = recipe.workload.work(vocabulary)
    full = WorkModel(linear=ours.linear, quadratic=2 * ours.quadratic)
    times = [
        sparsity_plan(recipe.sparsity, shapes, work=work, seq_len=2048, steps=100).times_fewer
        for work in (full, ours)
    ]
    assert times == pytest.approx([2.5, 2.8], abs=0.02)
    spec = shape.model_spec(2048)
    zeros = 3 * spec.layers * spec.block_matrices // 4
    dense = spec.training_flops([2048], 2048)
    assert times[1] == pytest.approx(dense / (dense - 6 * zeros * 2048))


def test_inspect_shows_every_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(["inspect", "gpt/sparse-tiny", "--json"]) == 0
    out, err = capsys.readouterr()
    first, second, last = json.loads(out.splitlines()[-1])["model"]["sparsity"]
    assert (first["level"], second["level"], last["level"]) == (0.75, 0.5, 0.0)
    assert first["layers"]["blocks.1.feed_forward.up"] == 0.75
    assert "phase 0: static, 75.0% of the sparse layers' weights at zero" in out + err
    assert "blocks.*.attention.query [128, 128] x 2: 75.00% zero" in out + err


def test_a_file_of_masks_vouches_for_itself(tmp_path: Path) -> None:
    masks = {"blocks.0.query": torch.ones(8, 8, dtype=torch.bool)}
    data = pack_masks(masks)
    path = tmp_path / "masks.safetensors"
    altered = bytearray(data)
    altered[-3] ^= 4
    for content in (bytes(altered), data.replace(b'"checksum"', b'"checksom"'), b"", data[:-1]):
        path.write_bytes(content)
        with pytest.raises(UserError, match="not a file of masks, or damaged"):
            read_masks(str(path), SHAPES)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=f"sparsity.masks: {path}: a folder, expected a file"):
        read_masks(str(path), SHAPES)


@pytest.mark.parametrize(
    ("sparsity", "line"),
    [
        ("{level: 1}", "sparsity.level: 1: expected a number at least 0 and below 1"),
        ("{level: -0.1}", "sparsity.level: -0.1: expected a number at least 0 and below 1"),
        ("{method: two_four, level: 0.75}", "sparsity.level: 0.75: expected a number"),
        ("{method: block, level: 0.5, block: 48}", "sparsity.block: 48: expected a divisor of"),
        (
            "{level: 0.5, layers: ['blocks.*.atention.query']}",
            "sparsity.layers.0: 'blocks.*.atention.query': no layer has that name; the nearest: "
            "blocks.*.attention.query, blocks.*.attention.key, blocks.*.attention.value",
        ),
        (
            "{level: 0.5, layers: ['*.query'], levels: [{layers: ['*.up'], level: 0.9}]}",
            "sparsity.levels.0.layers.0: '*.up': no layer has that name; the nearest: "
            "blocks.*.attention.query",
        ),
    ],
)
def test_mistakes_are_told_before_anything_starts(sparsity: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("gpt/tiny", [f"sparsity={sparsity}"])
    assert [problem.startswith(f"command line: {line}") for problem in caught.value.problems] == [
        True
    ]


def test_sizes_that_are_no_multiples_of_four_are_refused() -> None:
    overrides = ["workload.hidden_size=30", "workload.num_heads=2", "sparsity.method=two_four"]
    with pytest.raises(UserError, match=r"not 30 as in blocks\.0\.attention\.query; leave it out"):
        load_recipe("gpt/tiny", overrides)


def test_clipping_parts_of_buckets_is_refused() -> None:
    clip = ["clip.method=bucketwise", "clip.scope=local"]
    with pytest.raises(UserError, match=r"clip.scope: 'local': expected reduced with sparsity"):
        load_recipe("gpt/tiny", ["sparsity.level=0.5", *clip])


def test_masks_of_another_model_are_refused_before_anything_starts(tmp_path: Path) -> None:
    write_data_set(tmp_path / "data", samples=40)
    path = tmp_path / "other.safetensors"
    given = {"method": "given", "masks": str(path)}
    recipe = tiny_recipe(tmp_path / "data", tmp_path / "runs", phases=[{}, {"sparsity": given}])
    told = []
    for content in (None, b"no masks", pack_masks({"bert.query": torch.ones(2, 2).bool()})):
        if content:
            path.write_bytes(content)
        told += mask_problems(Recipe.model_validate(recipe))
    assert told == [
        f"phases.1.sparsity.masks: {path}: no such file",
        f"phases.1.sparsity.masks: {path}: not a file of masks, or damaged; expected one written "
        "by `elastrata export` as masks.safetensors",
        f"phases.1.sparsity.masks: {path}: of another model: it has a mask for bert.query, which "
        "this one lacks",
    ]
    settings = [f"data.path={tmp_path / 'data'}", f"storage={tmp_path / 'runs'}", "batch_size=8"]
    masks = f"sparsity={{method: given, masks: {path}}}"
    done = run("train", "bert/tiny", *settings, masks)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [told[-1].removeprefix("phases.1.")]
    assert not (tmp_path / "runs").exists()
