"""The report on a recipe's model: its parameters, by how they are updated."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.core.sparsity.plan import SparsityPlan
    from elastrata.launch.model_inspection import ModelInspection
    from elastrata.recipe.recipe import Recipe


def show_model(console: Console, name: str, recipe: Recipe, found: ModelInspection) -> None:
    """Prints the parameter groups of a recipe's model."""
    tokenizer = "" if found.prepared else ", as asked of `elastrata prepare`"
    console.print(f"recipe       {name}", markup=False)
    console.print(f"optimizer    {recipe.optimizer.name}, lr {recipe.optimizer.lr:g}", markup=False)
    for line in _left_open(recipe):
        console.print(f"auto         {line}", markup=False)
    console.print(f"vocabulary   {found.vocabulary:,} ids{tokenizer}\n", markup=False)
    _show_groups(console, found)
    for number, plan in enumerate(found.sparsity):
        _show_plan(console, plan, f"phase {number}" if len(found.sparsity) > 1 else "sparsity")
    console.print()


def _left_open(recipe: Recipe) -> list[str]:
    """What of the recipe is chosen where it trains."""
    lines = []
    if any(part.micro_batch_tokens == "auto" for part in recipe.parts):
        lines.append("micro_batch_tokens, counted here as if it were 8192 or one sample")
    if recipe.activation_checkpointing == "auto":
        lines.append("activation_checkpointing")
    return [f"{line}: `elastrata plan` tells what it would be on a cluster" for line in lines]


def _show_groups(console: Console, found: ModelInspection) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="bold")
    for heading in ("parameters", "updated by", "weight decay"):
        table.add_column(heading)
    for heading in ("tensors", "numbers"):
        table.add_column(heading, justify="right")
    for group in found.groups:
        decay = f"{group.weight_decay:g}" if group.weight_decay else "none"
        counts = (f"{len(group.parameters):,}", f"{group.num_parameters:,}")
        table.add_row(group.name, group.rule, decay, *counts)
    tensors = sum(len(group.parameters) for group in found.groups)
    table.add_row("all", "", "", f"{tensors:,}", f"{_num_parameters(found):,}")
    console.print(table)
    for group in found.groups:
        console.print(f"\n{group.name}", markup=False)
        for pattern, count in group.patterns().items():
            console.print(f"  {pattern}{f' x {count}' if count > 1 else ''}", markup=False)


def _show_plan(console: Console, plan: SparsityPlan, heading: str) -> None:
    """The layers of a phase by their share of zeros, and the FLOPs of a sample."""
    console.print(
        f"\n{heading}: {plan.method}, {plan.level:.1%} of the sparse layers' weights at zero; "
        f"{plan.flops:.3g} of {plan.flops_dense:.3g} FLOPs for {plan.seq_len:,} tokens, "
        f"{plan.times_fewer:.2f} times fewer",
        markup=False,
    )
    for (pattern, shape, share), count in _alike(plan).items():
        times = f" x {count}" if count > 1 else ""
        console.print(f"  {pattern} {list(shape)}{times}: {share:.2%} zero", markup=False)


def _alike(plan: SparsityPlan) -> Counter[tuple[str, tuple[int, int], float]]:
    """The layers with `*` for the numbers in their names, shapes and shares of zeros, each with how
    many it stands for."""
    return Counter(
        (re.sub(r"\.\d+(?=\.|$)", ".*", name), shape, plan.zeros[name] / (shape[0] * shape[1]))
        for name, shape in plan.shapes.items()
    )


def _num_parameters(found: ModelInspection) -> int:
    return sum(group.num_parameters for group in found.groups)


def model_result(found: ModelInspection) -> dict[str, Any]:
    """The same as JSON values."""
    return {
        "parameters": _num_parameters(found),
        "vocabulary": found.vocabulary,
        "prepared": found.prepared,
        "groups": [
            {
                "name": group.name,
                "rule": group.rule,
                "weight_decay": group.weight_decay,
                "tensors": len(group.parameters),
                "parameters": group.num_parameters,
                "patterns": group.patterns(),
            }
            for group in found.groups
        ],
        "sparsity": [
            {
                "method": plan.method,
                "level": plan.level,
                "layers": {
                    name: plan.zeros[name] / (rows * columns)
                    for name, (rows, columns) in plan.shapes.items()
                },
                "seq_len": plan.seq_len,
                "flops_dense": plan.flops_dense,
                "flops": plan.flops,
                "times_fewer": plan.times_fewer,
            }
            for plan in found.sparsity
        ],
    }
