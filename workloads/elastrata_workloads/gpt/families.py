"""The families of transformers' models that a GPT may belong to."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from elastrata_pipelines.errors import UserError
from elastrata_workloads.gpt import gpt2, llama
from elastrata_workloads.gpt.shape import GptShape

FAMILIES: Mapping[str, ModuleType] = {"gpt2": gpt2, "llama": llama}
"""By transformers' `model_type`."""


def family_of(shape: GptShape) -> ModuleType:
    """The module of the model in transformers that has this shape: `gpt2` or `llama`.

    Raises:
        UserError: there is none.
    """
    by_family = {family: family.differences(shape) for family in (gpt2, llama)}
    for family, differences in by_family.items():
        if not differences:
            return family
    raise UserError(
        f"workload: transformers has no such model: GPT-2 is without {', '.join(by_family[gpt2])}; "
        f"Llama without {', '.join(by_family[llama])}"
    )
