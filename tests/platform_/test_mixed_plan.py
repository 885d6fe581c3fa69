"""Plans on clusters of several kinds of devices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from elastrata.cli.main import run
from elastrata.cli.plan_mixed import lines_about_no_row
from elastrata.planner.block import Machine
from elastrata.planner.cluster import read_cluster, read_kinds
from elastrata.planner.cluster_config import cluster_schema
from elastrata.planner.hardware import GPU
from elastrata.planner.layout import Layout
from elastrata.planner.mixed import Kind, mixed_step
from elastrata.planner.mixed_plan import mixed_plan
from elastrata.planner.mixed_search import mixed_search
from elastrata.planner.mixed_stages import kinds_of_stages, speeds_of_stages, staged_step
from elastrata.planner.stack import elastrata
from elastrata.planner.step_time import step_time
from elastrata.recipe.file import load_recipe
from elastrata_pipelines.errors import UserError
from support.documented import documented_keys
from support.published import gpt

SMALL = gpt(24, 2304, 24)
FILE = """\
devices:
  - {device: A100-80GB, count: 8, price: 1.8}
  - {device: T4, count: 16, price: 0.35}
"""


def _kinds(text: str) -> list[Kind]:
    stack = elastrata("bf16", "fp32")
    return [Kind(cluster=one, machine=Machine(one.device, GPU, stack)) for one in read_kinds(text)]


def test_kinds_from_a_file_and_in_short(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE, encoding="utf-8")
    first, second = read_kinds(str(path))
    assert (first.device.name, first.devices, first.per_node, first.price) == (
        "A100-80GB",
        8,
        8,
        1.8,
    )
    assert (second.device.name, second.devices, second.per_node) == ("T4", 16, 4)
    short = read_kinds("8xA100 + 16xT4")
    assert [(one.device, one.devices) for one in short] == [(first.device, 8), (second.device, 16)]
    values = {"devices": [{"device": "T4", "count": 16}, {"device": "h100", "count": 8}]}
    jsonschema.validate(values, cluster_schema())


def test_every_mistake_about_kinds_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "devices:\n  - {device: T5, count: 0}\n  - {count: -1, price: 0}\nprice: 2\n",
        encoding="utf-8",
    )
    with pytest.raises(UserError) as found:
        read_kinds(str(path))
    lines = found.value.problems
    assert all(line.startswith(f"{path}: ") for line in lines)
    assert [line.split(": ")[1] for line in lines] == [
        "devices.0.device",
        "devices.0.count",
        "devices.1.device",
        "devices.1.count",
        "devices.1.price",
        "price",
    ]
    assert "did you mean 'T4'?" in lines[0]
    assert "0: expected a whole number above 0" in lines[1]
    assert not jsonschema.Draft202012Validator(cluster_schema()).is_valid(
        {"devices": [{"device": "T4", "count": 0}]}
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("devices: []\n", "devices: "),
        ("devices: [{device: T4, count: 8}, {device: t4, count: 8}]\n", "T4: 2 times: expected"),
        ("devices: [T4]\n", "devices.0: 'T4'"),
    ],
)
def test_what_is_no_list_of_kinds_is_told(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=line) as found:
        read_kinds(str(path))
    assert len(found.value.problems) == 1


def test_commands_for_one_kind_refuse_several() -> None:
    with pytest.raises(UserError, match="2 kinds of devices: expected one here"):
        read_cluster("8xA100+16xT4")
    with pytest.raises(UserError, match="0 devices: expected at least 1"):
        read_kinds("8xA100+0xT4")


def test_two_kinds_that_are_equal_are_as_fast_as_one() -> None:
    """The mixed model of a step is that of one kind where there is nothing to mix."""
    layout = Layout(shards=16)
    (first,) = _kinds("8xA100")
    step = mixed_step(SMALL, [first, first], layout, 512)
    assert step is not None
    assert [part.share for part in step.parts] == pytest.approx([0.5, 0.5])
    size = round(step.parts[0].micro_batch)
    whole = replace(first.cluster, devices=16)
    alone = step_time(SMALL, whole, first.machine, replace(layout, micro_batch=size), 512)
    assert step.time.total == pytest.approx(alone.total, rel=1e-6)


def test_samples_go_by_speed_and_every_kind_is_done_at_the_same_time() -> None:
    kinds = _kinds("8xA100+8xV100")
    step = mixed_step(SMALL, kinds, Layout(shards=16), 512)
    equal = mixed_step(SMALL, kinds, Layout(shards=16), 512, equal=True)
    assert step is not None
    assert equal is not None
    assert sum(part.share for part in step.parts) == pytest.approx(1, rel=1e-6)
    assert all(part.waiting < 1e-3 for part in step.parts)
    assert step.parts[0].micro_batch != pytest.approx(step.parts[1].micro_batch, rel=0.05)
    assert step.time.total < equal.time.total
    assert max(part.waiting for part in equal.parts) > 0.05


def test_its_own_memory_bounds_the_micro_batches_of_each_kind() -> None:
    layout = Layout(shards=24, checkpointing="full")
    kinds = _kinds("8xA100+16xT4")
    step = mixed_step(SMALL, kinds, layout, 512)
    assert step is not None
    large, small = step.parts
    assert large.most > small.most
    assert large.micro_batch <= large.most
    assert small.micro_batch <= small.most
    roomy = replace(kinds[1].cluster.device, memory_bytes=kinds[0].cluster.device.memory_bytes)
    kinds[1] = replace(kinds[1], cluster=replace(kinds[1].cluster, device=roomy))
    more = mixed_step(SMALL, kinds, layout, 512)
    assert more is not None
    assert more.parts[1].most == more.parts[0].most == large.most


def test_stages_lie_on_one_kind_each_and_a_slower_one_has_fewer_blocks() -> None:
    kinds = _kinds("8xA100+16xT4")
    assert [kind.name for kind in kinds_of_stages(kinds, 3)] == ["A100-80GB", "T4", "T4"]
    assert kinds_of_stages(kinds, 2) == []
    assert kinds_of_stages(kinds, 5) == []
    layout = Layout(pipeline=3, shards=8, micro_batch=1)
    stages = kinds_of_stages(kinds, 3)
    speeds = speeds_of_stages(SMALL, stages, layout)
    assert speeds[0] == 1
    assert speeds[1] == speeds[2] < 0.5
    by_speed = staged_step(SMALL, stages, layout, 512, speeds)
    equal = staged_step(SMALL, stages, layout, 512, None)
    assert by_speed is not None
    assert equal is not None
    assert by_speed.time.total < 0.75 * equal.time.total
    first, second = by_speed.parts
    assert sum(first.blocks) + sum(second.blocks) == SMALL.layers
    assert first.blocks[0] > 2 * max(second.blocks)


def test_a_slow_network_makes_stages_the_best_and_a_kind_not_worth_it() -> None:
    """Between kinds there are hidden states only."""
    slow, fast = _kinds("8xA100+8xV100")[::-1]
    device = replace(slow.cluster.device, network=0.1e9)
    slow = replace(slow, cluster=replace(slow.cluster, device=device))
    best = mixed_search(SMALL, [fast, slow], batch_size=512, steps=10, tensor_sizes=[1])
    assert best[0].layout.pipeline > 1
    assert best[0].layout.stage_speeds[0] > best[0].layout.stage_speeds[-1]
    dealt = next(one for one in best if one.layout.pipeline == 1)
    assert dealt.time.total > best[0].time.total


def test_advice_about_each_kind(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE, encoding="utf-8")
    recipe = load_recipe("gpt/125m")
    made = mixed_plan(recipe, recipe.parts[0], read_kinds(str(path)))
    by_name = {one.device: one for one in made.advice}
    best, cheap = made.families[0], by_name["T4"]
    assert cheap.tokens_per_second_without is not None
    assert cheap.is_worth_it
    more = best.tokens_per_second - cheap.tokens_per_second_without
    added = 16 * 0.35 / (more * 3600) * 1e6
    assert cheap.cost_per_million_tokens_added == pytest.approx(added)
    far = [*read_kinds(str(path))]
    far[1] = replace(far[1], device=replace(far[1].device, network=1e6))
    lonely = mixed_plan(recipe, recipe.parts[0], far)
    advice = next(one for one in lonely.advice if one.device == "T4")
    assert not advice.is_worth_it
    assert "16xT4: not worth their messages: without them a step is" in advice.text


def test_a_kind_on_which_the_model_fits_nowhere_is_told() -> None:
    recipe = load_recipe("gpt/7b")
    first, second = read_kinds("64xA100+4xT4")
    tiny = replace(second, device=replace(second.device, memory_bytes=2.0**30))
    with pytest.raises(UserError) as found:
        mixed_plan(recipe, recipe.parts[0], [first, tiny])
    (line,) = found.value.problems
    assert line.startswith("--cluster: devices: T4: the model fits on it under no layout")
    assert line.endswith("; without this kind the others train it")


def test_a_mixed_plan_is_shown_written_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, written = tmp_path / "cluster.yaml", tmp_path / "planned.yaml"
    path.write_text(FILE, encoding="utf-8")
    options = ["--cluster", str(path), "--write", str(written), "--explain", "--json"]
    assert run(["plan", "gpt/125m", *options]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert list(result) == documented_keys("plan")
    assert [kind["device"] for kind in result["kinds"]] == ["A100-80GB", "T4"]
    assert sum(part["share"] for part in result["layouts"][0]["parts"]) == pytest.approx(1)
    assert "worth adding to the others?" in shown.err
    recipe = load_recipe(str(written))
    assert recipe.workers.max == 24
    assert run(["plan", "gpt/125m", "--cluster", str(path), "--rehearse", "--price", "2"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in told] == ["--price", "--rehearse"]


def test_a_kind_with_less_than_a_sample_is_told() -> None:
    recipe = load_recipe("gpt/125m", ["batch_size=24"])
    made = mixed_plan(recipe, recipe.parts[0], read_kinds("8xA100+16xT4"))
    dealt = next(one for one in made.families if one.layout == replace(one.layout, pipeline=1))
    lines = lines_about_no_row(made, dealt)
    each = {part.device: part.share * 24 / part.devices for part in dealt.parts}
    assert min(each.values()) < 1
    assert len(lines) == sum(samples < 1 for samples in each.values())
    assert all(line.startswith("batch_size: 24: in some steps a ") for line in lines)
