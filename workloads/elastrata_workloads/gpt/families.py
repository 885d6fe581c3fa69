"""The families of transformers' models that a GPT may belong to."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from elastrata_pipelines.errors import UserError
from elastrata_workloads.gpt import gpt2, llama, qwen3
from elastrata_workloads.gpt.shape import GptShape

FAMILIES: Mapping[str, ModuleType] = {"gpt2": gpt2, "llama": llama, "qwen3": qwen3}
"""By transformers' `model_type`."""
_SHOWN = {"GPT-2": gpt2, "Llama": llama, "Qwen3": qwen3}


def family_of(shape: GptShape) -> ModuleType:
    """The module of the model in transformers that has this shape: one of `FAMILIES`.

    Raises:
        UserError: there is none.
    """
    by_family = {family: family.differences(shape) for family in FAMILIES.values()}
    for family, differences in by_family.items():
        if not differences:
            return family
    lacks = "; ".join(
        f"{name} without {', '.join(by_family[family])}" for name, family in _SHOWN.items()
    )
    raise UserError(f"workload: transformers has no such model: {lacks}")
