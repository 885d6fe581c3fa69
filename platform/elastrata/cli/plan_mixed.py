"""`elastrata plan` on a cluster of several kinds of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from elastrata.cli.plan_report import layout_results, show_table, terms_lines
from elastrata_pipelines.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.planner.mixed import Part
    from elastrata.planner.mixed_plan import MixedPlan
    from elastrata.planner.mixed_search import MixedForecast

_GIB = 2**30


def refuse_options(**given: bool) -> None:
    """Refuses what is for one kind of device.

    Raises:
        UserError: a line for each option that was given.
    """
    reasons = {
        "price": "expected a price for each kind, in the cluster's file",
        "plot": "expected one kind of device, whose memory the picture is about",
        "rehearse": "expected one kind of device, as one is imitated",
    }
    problems = [f"--{name}: {reasons[name]}" for name, is_given in given.items() if is_given]
    if problems:
        raise UserError(*problems)


def show_mixed_plan(
    console: Console, made: MixedPlan, best: Sequence[MixedForecast], *, explain: bool
) -> None:
    """The best layouts, what each kind does in the first of them, and what each adds."""
    show_table(console, best)
    forecast = best[0]
    for line in terms_lines(forecast) if explain else ():
        console.print(line, markup=False)
    console.print(f"\n{forecast.layout}", markup=False)
    room = {kind.name: kind.cluster.device.memory_bytes for kind in made.kinds}
    for part in forecast.parts:
        console.print(f"  {_part(part, room[part.device])}", markup=False)
    equal = equal_tokens_per_second(made, forecast)
    if equal is not None:
        console.print(
            f"with equal hands {equal:,.0f} tokens/s: dealt by speed it is "
            f"{forecast.tokens_per_second / equal:.2f} times as fast",
            markup=False,
        )
    console.print("\nworth adding to the others?")
    for one in made.advice:
        console.print(f"  {one.text}", markup=False)
    for line in lines_about_no_row(made, forecast):
        console.print(line, markup=False)


def equal_tokens_per_second(made: MixedPlan, forecast: MixedForecast) -> float | None:
    """Tokens per second if every rank had equally many samples; None in stages, or where a kind has
    too little memory for them."""
    from elastrata.planner.mixed_search import equal_hands

    if forecast.layout.pipeline > 1:
        return None
    return equal_hands(made.model, made.kinds, forecast.layout, made.batch_size)


def mixed_result(made: MixedPlan, best: Sequence[MixedForecast]) -> dict[str, Any]:
    """The plan as JSON values, with the keys of one on a single kind."""
    layouts = layout_results(best, [None] * len(best))
    for result, forecast in zip(layouts, best, strict=True):
        result["parts"] = [_part_result(part) for part in forecast.parts]
    return {
        "device": made.name,
        "devices": made.devices,
        "per_node": None,
        "parameters": made.model.parameters,
        "batch_size": made.batch_size,
        "steps": made.steps,
        "seq_len": made.model.seq_len,
        "fitting": len(made.families),
        "too_large": None,
        "layouts": layouts,
        "kinds": [asdict(one) for one in made.advice],
    }


def _part(part: Part, room: float) -> str:
    told = f"{part.devices}x{part.device}: {part.share:.1%} of the "
    if part.blocks:
        blocks = ", ".join(map(str, part.blocks))
        told += f"blocks ({blocks}), micro-batches of {part.micro_batch:g} samples"
    else:
        told += f"samples, micro-batches of {part.micro_batch:.3g}"
        told += f" (room for {part.most})"
    told += f", {part.memory.total / _GIB:.1f} GiB of {room / _GIB:.1f}"
    return told + (f", waits {part.waiting:.1%} of a step" if part.waiting > 0.0005 else "")


def _part_result(part: Part) -> dict[str, Any]:
    return {**asdict(part), "memory": part.memory.total}


def lines_about_no_row(made: MixedPlan, forecast: MixedForecast) -> list[str]:
    """A line for each kind that has less than a sample in a step."""
    lines = []
    for part in forecast.parts:
        each = part.share * made.batch_size * forecast.layout.tensor / part.devices
        if forecast.layout.pipeline == 1 and each < 1:
            least = -(-made.batch_size // each) if each else float("inf")
            lines.append(
                f"batch_size: {made.batch_size}: in some steps a {part.device} has no row; "
                f"{least:,.0f} samples give each one"
            )
    return lines
