"""The table of what is tried and measured on a GPU, most valuable first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REHEARSED = ("gpu_speed:machine", "gpu_speed:steps")
"""All others look at numbers."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row that is to be."""

    name: str
    function: str
    """`module:function`; its result, a dictionary, is the row's."""
    seconds: float
    """It is killed after so long."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the function, and part of the row."""
    instead_of: str = ""
    """Runs only where the case of this name ran out of memory."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its process, on a GPU."""


def _fitting(part: str, model: str, *overrides: str, seconds: float, **values: Any) -> list[Case]:
    """Steps of a model, with as little computed again as fits."""
    cases: list[Case] = []
    for way in ("none", "selective", "full"):
        cases.append(
            Case(
                name=f"{part}: {model}, {way}",
                function="gpu_speed:steps",
                seconds=seconds,
                instead_of=cases[-1].name if cases else "",
                values={
                    "model": model,
                    "overrides": [*overrides, f"activation_checkpointing={way}"],
                    **values,
                },
            )
        )
    return cases


def _check(name: str, function: str, seconds: float, **values: Any) -> Case:
    return Case(
        name=f"check: {name}", function=f"gpu_checks:{function}", seconds=seconds, values=values
    )


COMPILED, EAGER = "compile=true", "compile=false"
NATURAL = "natural"
CHECKS = [
    Case(name="machine", function="gpu_speed:machine", seconds=240),
    _check("varlen attention beside dense", "attention_beside_dense", 120),
    _check("steps beside the CPU's", "steps_beside_cpu", 120),
    _check("saved and loaded", "saved_and_loaded", 120),
    _check("compiled, each way of checkpointing", "ways_agree", 180),
    Case(
        name="check: streams, sanitised",
        function="gpu_checks:streams",
        seconds=120,
        environment={"TORCH_CUDA_SANITIZER": "1"},
    ),
]
MODELS = [
    *_fitting("speed", "gpt/125m", COMPILED, seconds=120, aim=0.40),
    *_fitting("speed", "gpt/1.3b", COMPILED, seconds=150, aim=0.50),
    *_fitting("speed", "bert/large", COMPILED, seconds=150, lengths=NATURAL, published=833),
    *_fitting("speed", "gpt/760m", COMPILED, seconds=150, aim=0.45),
    *_fitting("speed", "gpt/350m", COMPILED, seconds=120),
]
LARGE = [
    *_fitting("speed", "gpt/7b", COMPILED, seconds=240, aim=0.52),
    *(
        case
        for model, sizes in (("gpt/1.3b", (4096, 16384, 32768)), ("gpt/125m", (32768, 65536)))
        for size in sizes
        for case in _fitting(
            f"micro-batches of {size}",
            model,
            COMPILED,
            f"micro_batch_tokens={size}",
            seconds=120,
        )
    ),
    *_fitting("padded", "bert/large", COMPILED, seconds=120, lengths=NATURAL, padded=True),
    *(
        Case(
            name=f"trace: {model}",
            function="gpu_speed:trace",
            seconds=150,
            values={"model": model, "overrides": [COMPILED], "lengths": lengths},
        )
        for model, lengths in (("gpt/1.3b", "full"), ("bert/large", NATURAL))
    ),
]
TWO_FOUR = [
    *(
        Case(
            name=f"2:4 products: {model}",
            function="gpu_speed:two_four_products",
            seconds=120,
            values={"model": model},
        )
        for model in ("gpt/1.3b", "gpt/7b")
    ),
    *(
        case
        for way, sparsity in (
            ("dense", ()),
            ("masks", ("sparsity={method: two_four}",)),
            ("kernels", ("sparsity={method: two_four, kernels: true}",)),
        )
        for case in _fitting(
            f"2:4 {way}",
            "gpt/1.3b",
            COMPILED,
            "precision=bf16",
            "workload.num_layers=6",
            *sparsity,
            seconds=120,
        )
    ),
]
REST = [
    _check("BERT's loss and gradients", "bert_agrees", 240, model="bert/base", lengths=NATURAL),
    *_fitting("eager", "gpt/1.3b", EAGER, seconds=120),
    *_fitting("speed", "bert/base", COMPILED, seconds=120, lengths=NATURAL),
    *_fitting("full length", "bert/large", COMPILED, seconds=120),
    *(
        Case(
            name=f"clip: {way}",
            function="gpu_speed:clip_beside",
            seconds=120,
            values={
                "model": "bert/large",
                "overrides": [COMPILED, f"clip.method={way}"],
                "lengths": NATURAL,
            },
        )
        for way in ("none", "global_norm", "bucketwise")
    ),
]
TABLE = (*CHECKS, *MODELS, *LARGE, *TWO_FOUR, *REST)
