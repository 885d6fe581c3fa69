"""`auto`: what is chosen, that no measured step ever needs more than there is, and that what is
learned does not depend on it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastrata.parallel.parallelize import GradientSync
from elastrata.planner.choice import (
    USABLE,
    Choice,
    Choices,
    MemoryCorrection,
    fastest_together,
    micro_batch_budgets,
    smallest_together,
)
from elastrata.planner.cluster import read_cluster
from elastrata.planner.devices import DEVICES, GPU, match_device
from elastrata.planner.layout import Layout
from elastrata.planner.operations import Machine
from elastrata.planner.stack import engine_stack
from elastrata.recipe.recipe import Recipe
from elastrata.step.events import Chosen
from elastrata.trainer.autotune import ChoiceTuner, PhaseChoices, describe_fitting_choices
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.speeds import RankKind
from support.bare_loop import (
    train_after_running_out,
    train_automatically,
    train_by_kinds,
    train_on_ranks,
)
from support.published import gpt
from support.ranks import run_ranks
from support.synthetic import SEQ_LEN, tiny_recipe, write_data_set

AUTO = {"micro_batch_tokens": "auto", "activation_checkpointing": "auto"}
STEPS = 7
RELATIVE = 1e-5
"""fp32 sums in another order differ by some 1e-7 each; AdamW adds that up over the steps."""


def _choices(
    batch_size: int = 256, syncs: tuple[GradientSync, ...] = ("step",), **layout: Any
) -> Choices:
    model = gpt(24, 2304, 24)
    return Choices(
        model=model,
        cluster=read_cluster("8xA100"),
        machine=Machine(DEVICES["A100-80GB"], GPU, engine_stack("bf16", "fp32")),
        layout=Layout(**(layout or {"shards": 8})),
        batch_size=batch_size,
        budgets=micro_batch_budgets(model.seq_len, batch_size),
        policies=("none", "full"),
        syncs=syncs,
    )


def test_the_best_is_the_fastest_that_fits() -> None:
    choices = _choices()
    room = 60 * 2**30
    best = choices.best(lambda one: choices.bytes(one) <= room)
    fitting = [one for one in choices.all if choices.bytes(one) <= room]
    assert best in fitting
    assert choices.seconds(best) <= 1.01 * min(map(choices.seconds, fitting))
    assert choices.best(lambda _: True).activation_checkpointing == "none"
    more = [choices.bytes(one) for one in choices.all if one.activation_checkpointing == "none"]
    assert more == sorted(more)


def test_gradients_are_summed_after_every_micro_batch_where_memory_is_short() -> None:
    open_, once = _choices(syncs=("step", "micro_batch")), _choices()
    largest = once.bytes(once.smallest)
    short = open_.best(lambda one: open_.bytes(one) < largest)
    assert short.gradient_sync == "micro_batch"
    whole = 4 * open_.model.parameters
    assert largest - open_.bytes(open_.smallest) > 0.5 * whole
    assert open_.best(lambda one: open_.bytes(one) <= 75 * 2**30).gradient_sync == "step"
    smallest = open_.smallest
    assert open_.seconds(smallest) >= open_.seconds(replace(smallest, gradient_sync="step"))


@given(
    scale=st.floats(0.4, 2.0),
    fixed=st.floats(-0.5, 6.0),
    memory=st.floats(30.0, 140.0),
    filled=st.lists(st.floats(0.3, 1.0), min_size=12, max_size=12),
)
def test_no_step_needs_more_than_there_is(
    scale: float, fixed: float, memory: float, filled: list[float]
) -> None:
    """Of a device whose steps need up to twice as much for their activations as the plan says, and
    something beside; micro-batches are not always full."""
    choices, correction = _choices(), MemoryCorrection()
    smallest = choices.bytes(choices.smallest)

    def needed(choice: Choice, tokens: int) -> float:
        return smallest + fixed * 2**30 + scale * (choices.bytes(choice, tokens) - smallest)

    available = memory * 2**30
    longest = choices.budgets[0]
    if needed(choices.smallest, longest) > USABLE * available:
        return
    peak, choice = 0.0, choices.smallest
    for share in filled:
        choice = correction.next(choices)
        tokens = max(longest, round(share * choice.micro_batch_tokens))
        peak = max(peak, needed(choice, tokens))
        assert peak <= available
        if not correction.is_over:
            correction.measured(choices, choice, tokens, USABLE * available - peak)
    assert needed(choice, choice.micro_batch_tokens) <= available


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10", "A10"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "A100-40GB-3g.20gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100-80GB-1g.10gb"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla T4", "T4"),
        ("CPU", "CPU"),
        ("NVIDIA RTX A6000", "A100-80GB"),
    ],
)
def test_devices_are_known_by_their_drivers_names(name: str, known: str) -> None:
    assert match_device(name).name == known


def test_every_phase_chooses_and_the_second_goes_by_what_the_first_has_shown() -> None:
    short, ways = _choices(batch_size=4, shards=1), list[str]()
    phases = [
        PhaseChoices(last_step=6, kinds=(short,)),
        PhaseChoices(last_step=12, kinds=(_choices(batch_size=32, shards=1),)),
    ]
    cpu, memory = torch.device("cpu"), 2**40
    chooser = ChoiceTuner(phases, "none", ways.append, cpu, memory)
    news: list[Chosen] = []
    foreseen: list[int] = []
    for part in chooser.cut((_empty_step(number) for number in range(1, 13)), news.append):
        following = _empty_step(part.step + 1)
        if chooser.foreseen(following) is not None:
            foreseen.append(following.step)
    assert foreseen == [6, 12], "of no phase before its choice is made and measured"
    assert [one.step for one in news] == [1, 5, 7, 11]
    assert [one.activation_checkpointing for one in news] == ["full", "none", "none", "none"]
    tokens = [one.micro_batch_tokens for one in news]
    assert tokens[0] == short.budgets[0] < tokens[1] <= short.budgets[-1]
    assert tokens[2] >= tokens[1]
    assert ways == ["full", "none"]
    settled = chooser.state()
    assert list(settled["chosen"]) == ["tp1 pp1 1x1, phase 0", "tp1 pp1 1x1, phase 1"]
    again = ChoiceTuner(phases, "none", ways.append, cpu, memory)
    again.restore(settled)
    (kept,) = _news(again, 9)
    assert (kept.micro_batch_tokens, kept.activation_checkpointing) == (tokens[-1], "none")
    smaller = ChoiceTuner(phases, "none", ways.append, cpu, 2**35)
    smaller.restore(settled)
    (anew,) = _news(smaller, 9)
    assert anew.text.startswith("first; the plan has")


def _news(chooser: ChoiceTuner, step: int) -> list[Chosen]:
    news: list[Chosen] = []
    list(chooser.cut([_empty_step(step)], news.append))
    return news


def _empty_step(number: int) -> RankStep:
    nothing = np.zeros(0, np.int64)
    rows = Rows(
        sample_ids=nothing.astype(np.uint64), epochs=nothing, lengths=nothing, tokens=nothing
    )
    return RankStep(step=number, rows=rows, cuts=np.array([0, 0]), imbalance=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("automatic")
    write_data_set(folder, samples=200)
    return folder


def _numbers(records: Any) -> list[tuple[float, float]]:
    return [(record.loss, record.gradient_norm) for record in records]


def test_samples_and_losses_do_not_depend_on_what_is_chosen(folder: Path) -> None:
    values = tiny_recipe(folder, folder / "runs", steps=STEPS)
    fixed = run_ranks(2, train_on_ranks, values)[0]
    ranks = run_ranks(2, train_automatically, {**values, **AUTO})
    records, chosen, state = ranks[0]
    assert [r.digest for r in records] == [r.digest for r in fixed]
    assert [r.loss for r in records] == pytest.approx([r.loss for r in fixed], rel=RELATIVE)
    assert [one.step for one in chosen] == [1, 5]
    first, last = records[0], records[-1]
    assert (first.micro_batch_tokens, first.activation_checkpointing) == (SEQ_LEN, "full")
    assert (last.micro_batch_tokens, last.activation_checkpointing) == (SEQ_LEN * 16, "none")
    assert first.micro_batches > last.micro_batches == 1
    for other, told, kept in ranks[1:]:
        assert [r.micro_batch_tokens for r in other] == [r.micro_batch_tokens for r in records]
        assert (told, kept) == (chosen, state)

    # A group like it begins with what this one has settled on.
    again, before, _ = run_ranks(2, train_automatically, {**values, **AUTO}, state)[0]
    assert [one.text for one in before] == ["as before in a group of this size"]
    same = {**values, "micro_batch_tokens": last.micro_batch_tokens}
    assert _numbers(again) == _numbers(run_ranks(2, train_on_ranks, same)[0])

    # Another one measures anew; with too little memory it stays with what needs least.
    tight = {**values, **AUTO, "workers": {**values["workers"], "memory_gb": 0.35}}
    alone = run_ranks(1, train_automatically, tight, state)[0][0]
    assert {r.micro_batch_tokens for r in alone} == {SEQ_LEN}
    assert {r.activation_checkpointing for r in alone} == {"full"}
    plain = {**values, "micro_batch_tokens": SEQ_LEN}
    assert _numbers(alone) == _numbers(run_ranks(1, train_on_ranks, plain)[0])


def test_each_kind_of_rank_has_micro_batches_as_large_as_its_memory_allows(folder: Path) -> None:
    """Of 64 samples a step, 32 on each rank; the second one has memory for few more than one."""
    values = tiny_recipe(folder, folder / "runs", steps=STEPS, batch_size=64)
    values = {**values, "activation_checkpointing": "full"}
    fixed = run_ranks(2, train_on_ranks, values)[0]
    auto, kinds = {**values, "micro_batch_tokens": "auto"}, (RankKind("A100"), RankKind("T4"))
    ranks = run_ranks(2, train_by_kinds, auto, kinds, (8.0, 0.35))
    records, chosen, state, held_out = ranks[0]
    assert [r.digest for r in records] == [r.digest for r in fixed]
    assert [r.loss for r in records] == pytest.approx([r.loss for r in fixed], rel=RELATIVE)
    by_kind = records[-1].micro_batch_tokens_by_kind
    assert by_kind == {"A100": SEQ_LEN * 32, "T4": SEQ_LEN}
    assert records[-1].micro_batch_tokens == SEQ_LEN * 32
    assert chosen[-1].micro_batch_tokens_by_kind == by_kind
    assert [one.step for one in chosen] == [1, 5]
    assert ranks[1][1:] == (chosen, state, held_out)
    group = "tp1 pp1 1x2, phase 0"
    assert list(state["chosen"]) == [f"{group}, {name} of A100, T4" for name in ("A100", "T4")]

    # A group like it begins with what this one has settled on, whichever rank has which device.
    again, before, _, _ = run_ranks(2, train_by_kinds, auto, kinds[::-1], (2.0, 8.0), state)[1]
    assert [one.text for one in before] == ["as before in a group of this size"]
    assert again[0].micro_batch_tokens_by_kind == by_kind

    # One in which a kind has less memory than it took measures anew.
    less, anew, _, _ = run_ranks(2, train_by_kinds, auto, kinds, (0.35, 0.35), state)[0]
    assert anew[0].text.startswith("first; the plan has A100: ")
    assert (less[-1].micro_batch_tokens, less[-1].micro_batch_tokens_by_kind) == (SEQ_LEN, {})

    # A kind that ran out of memory gets smaller ones, until there is nothing smaller.
    ran_out, after = run_ranks(2, train_after_running_out, auto, kinds, state, 0)[0]
    assert ran_out is not None
    assert (ran_out.group, ran_out.choice["micro_batch_tokens"]) == (
        f"{group}, A100 of A100, T4",
        SEQ_LEN * 32,
    )
    tokens = [r.micro_batch_tokens_by_kind.get("A100", r.micro_batch_tokens) for r in after]
    assert max(tokens) < SEQ_LEN * 32
    nothing, _ = run_ranks(2, train_after_running_out, auto, kinds, state, 1)[0]
    assert nothing is None, "there is nothing smaller than one sample"


def test_kinds_choose_what_goes_together() -> None:
    """Each has the micro-batches that it has room for."""
    large, small = _choices(), replace(_choices(), cluster=read_cluster("8xA100-40GB"))
    room = (75 * 2**30, 35 * 2**30)
    kinds = (large, small)
    chosen = fastest_together(kinds, lambda n, one: kinds[n].bytes(one) <= room[n])
    assert chosen is not None
    assert len({(one.activation_checkpointing, one.gradient_sync) for one in chosen}) == 1
    assert all(kind.bytes(one) <= most for kind, one, most in zip(kinds, chosen, room, strict=True))
    assert chosen[0].micro_batch_tokens > chosen[1].micro_batch_tokens
    assert fastest_together(kinds, lambda n, one: n == 0) is None
    smallest = smallest_together(kinds)
    assert smallest == (large.smallest, small.smallest)
    gone = replace(small, below=0.0)
    assert smallest_together((large, gone)) is None
    assert fastest_together((large,), lambda n, one: True) == (large.best(lambda _: True),)


def test_what_cannot_fit_is_refused_before_the_first_step(folder: Path) -> None:
    values = tiny_recipe(folder, folder / "runs", **AUTO)
    values["workers"]["memory_gb"] = 0.01
    with pytest.raises(UserError, match="a worker would need 0"):
        run_ranks(1, train_automatically, values)


def test_what_ran_out_of_memory_is_not_chosen_again() -> None:
    """Nor anything that needs as much, in whatever group comes after, though one settled on it."""
    phases = [PhaseChoices(last_step=12, kinds=(_choices(batch_size=4, shards=1),))]
    cpu, memory = torch.device("cpu"), 2**40
    first = ChoiceTuner(phases, "none", lambda _: None, cpu, memory)
    assert first.ran_out() is None, "no step was taken"
    for _ in first.cut((_empty_step(number) for number in range(1, 8)), lambda _: None):
        pass
    ran_out = first.ran_out()
    assert ran_out is not None
    assert ran_out.choice.items() >= first.figures().items()
    assert ran_out.group == "tp1 pp1 1x1, phase 0"
    needed = phases[0].kinds[0].bytes(Choice(**ran_out.choice))

    def taken(chooser: ChoiceTuner) -> list[float]:
        found = []
        for _ in chooser.cut((_empty_step(number) for number in range(8, 13)), lambda _: None):
            found.append(phases[0].kinds[0].bytes(Choice(**chooser.figures())))
        return found

    again = ChoiceTuner(phases, "none", lambda _: None, cpu, memory)
    again.restore(first.state())
    assert taken(again)[0] == needed, "as before in a group of this size"
    second = ChoiceTuner(phases, "none", lambda _: None, cpu, memory)
    second.restore(first.state())
    second.avoid([ran_out, replace(ran_out, group="tp2 pp1 1x1, phase 0", choice={})])
    assert max(taken(second)) < needed
    then = second.ran_out()
    assert then is not None
    third = ChoiceTuner(phases, "none", lambda _: None, cpu, memory)
    third.avoid([then, ran_out])
    assert max(taken(third)) < phases[0].kinds[0].bytes(Choice(**then.choice))


def test_settings_that_fit_are_named(folder: Path) -> None:
    """By the plan of a CPU that has as much memory as the recipe says."""
    values = tiny_recipe(folder, folder / "runs", micro_batch_tokens=SEQ_LEN * 64)
    values["batch_size"] = 64

    def line(gigabytes: float, **changes: Any) -> str:
        workers = {**values["workers"], "memory_gb": gigabytes}
        recipe = Recipe.model_validate({**values, **changes, "workers": workers})
        return describe_fitting_choices(recipe, find_training_data(recipe).phases)

    told = line(0.36)
    assert told.startswith("out of memory: CPU, 0.3 GiB: micro_batch_tokens=3072")
    found = re.search(
        r"; by the plan, micro_batch_tokens=(\d+) activation_checkpointing=\w+.* fits", told
    )
    assert found is not None
    assert int(found[1]) <= SEQ_LEN * 64
    nothing = line(0.1)
    assert "nor, by the plan, would smaller ones on 1 worker; use more workers" in nothing
    assert "nor, by the plan" in line(0.1, **AUTO)
