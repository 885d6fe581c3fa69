"""The planner's parts: clusters, memory, time, bubbles, the search, and what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastrata.planner.activations import micro_batches_in_flight
from elastrata.planner.cluster import read_cluster
from elastrata.planner.devices import DEVICES, GPU
from elastrata.planner.layout import Layout
from elastrata.planner.memory import blocks_of_stages
from elastrata.planner.operations import Machine
from elastrata.planner.plan import plan, search
from elastrata.planner.stack import MEGATRON_2021, engine_stack
from elastrata.planner.step_time import bubble_passes, stage_time, step_time
from elastrata.recipe.data_sets import data_spec
from elastrata.recipe.file import load_recipe
from elastrata.workload.workload import model_spec
from elastrata_pipelines.errors import UserError
from support.published import gpt

A100 = DEVICES["A100-80GB"]
MACHINE = Machine(A100, GPU, engine_stack("bf16", "fp32"))
SMALL = gpt(24, 2304, 24)


@pytest.mark.parametrize("name", ["gpt/llama-7b", "bert/base"])
def test_the_parameters_are_those_of_the_model(name: str) -> None:
    recipe = load_recipe(name)
    spec = data_spec(recipe)
    with torch.device("meta"):
        built = recipe.workload.build_model(spec.vocabulary, spec.seq_len)
    counted = sum(parameter.numel() for parameter in built.parameters())
    model = model_spec(recipe.workload, spec.vocabulary, spec.seq_len)
    assert model.parameters == pytest.approx(counted, rel=2e-3)
    blocks = recipe.workload.blocks(built)
    own = sum(parameter.numel() for parameter in blocks[0].parameters())
    assert model.block_parameters == own


def test_a_cluster_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "device: H100\ndevices: 16\nper_node: 4\nnetwork_gbit: 100\nprice: 2.5\n", encoding="utf-8"
    )
    cluster = read_cluster(str(path))
    assert (cluster.device.network, cluster.per_node, cluster.price) == (12.5e9, 4, 2.5)


def test_every_mistake_of_a_cluster_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "devices: 0\npernode: 8\nprice: cheap\nmemory_gb: true\ndevice: H10-80GB\n",
        encoding="utf-8",
    )
    with pytest.raises(UserError) as found:
        read_cluster(str(path))
    device, *others = found.value.problems
    assert device.startswith(
        f"{path}: device: 'H10-80GB': no such device (did you mean 'H100-80GB'?); known: A100"
    )
    assert others == [
        f"{path}: devices: 0: expected a whole number above 0",
        f"{path}: memory_gb: true: expected a number above 0 or null",
        f"{path}: price: 'cheap': expected a number above 0 or null",
        f"{path}: pernode: 8: unknown key (did you mean 'per_node'?)",
    ]
    path.write_text("device: T4\n", encoding="utf-8")
    with pytest.raises(UserError, match="devices: missing: expected a whole number above 0"):
        read_cluster(str(path))


def test_a_slice_is_a_device_with_its_share() -> None:
    whole, part = DEVICES["H100-80GB"], read_cluster("2xh100-80gb-3G.40GB").device
    assert part.memory_bytes == whole.memory_bytes / 2
    assert part.peak_flops == pytest.approx(whole.peak_flops * 48 / 132)


def test_bubbles_by_schedule() -> None:
    plain = Layout(pipeline=8)
    assert bubble_passes(plain, 64) == 7
    assert bubble_passes(replace(plain, virtual_stages=2, schedule="interleaved_1f1b"), 64) == 3.5
    assert bubble_passes(replace(plain, schedule="zero_bubble"), 64) == pytest.approx(7 / 3)
    assert bubble_passes(Layout(), 64) == 0


def test_micro_batches_in_flight_by_schedule() -> None:
    plain = Layout(pipeline=4)
    assert [micro_batches_in_flight(plain, 64, stage) for stage in (0, 3)] == [4, 1]
    assert micro_batches_in_flight(plain, 2, 0) == 2
    assert micro_batches_in_flight(replace(plain, schedule="gpipe"), 64, 3) == 64
    divided = replace(plain, schedule="zero_bubble")
    assert {micro_batches_in_flight(divided, 64, stage) for stage in range(4)} == {4}
    in_turns = replace(plain, schedule="interleaved_1f1b", virtual_stages=2)
    assert [micro_batches_in_flight(in_turns, 64, stage) for stage in (0, 3)] == [5.5, 2.5]


def test_a_stage_whose_head_costs_much_has_fewer_blocks() -> None:
    wide, layout = replace(gpt(4, 768, 12), vocabulary=50_368), Layout(pipeline=2, shards=4)
    narrow = replace(wide, vocabulary=256)
    assert blocks_of_stages(wide, MACHINE.stack, layout) == (3, 1)
    assert blocks_of_stages(narrow, MACHINE.stack, layout) == (2, 2)
    assert blocks_of_stages(wide, MEGATRON_2021, layout) == (2, 2)
    slow_first = replace(layout, stage_speeds=(0.5, 1.0))
    assert blocks_of_stages(narrow, MACHINE.stack, slow_first) == (1, 3)
    cluster = read_cluster("8xA100")
    first, last = (
        stage_time(wide, cluster, MACHINE, layout, 64, blocks=blocks, has_head=has_head)
        for blocks, has_head in ((3, False), (1, True))
    )
    assert first.head == 0 < last.head
    slowest = step_time(wide, cluster, MACHINE, layout, 64)
    assert slowest in (first, last)
    assert slowest.total == max(first.total, last.total)


def test_the_best_layout_is_the_fastest_that_fits() -> None:
    found = search(
        SMALL, read_cluster("16xA100"), MACHINE, batch_size=64, steps=10, tensor_sizes=(1, 2)
    )
    times = [one.time.total for one in found.forecasts]
    assert times == sorted(times)
    assert all(one.memory.total <= A100.memory_bytes for one in found.forecasts)
    assert all(one.layout.devices == 16 for one in found.forecasts)
    best, second = found.families[:2]
    assert second.explain_slowdown(best).startswith("+")
    assert best.explain_slowdown(best) == ""


def test_a_model_that_fits_nowhere_is_told_what_would_help() -> None:
    recipe = load_recipe("gpt/megatron-145.6b")
    with pytest.raises(UserError) as found:
        plan(recipe, recipe, read_cluster("8xA100-80GB"))
    line, remedy = found.value.problems
    assert "no layout fits" in line
    assert "GiB too much" in line
    assert remedy.startswith("it would fit on ")
