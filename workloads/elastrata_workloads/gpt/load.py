"""A GPT-2, Llama or Qwen3 of transformers as one of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from elastrata_pipelines.errors import UserError
from elastrata_workloads.gpt.families import FAMILIES
from elastrata_workloads.gpt.workload import Gpt


def from_transformers(folder: Path | str) -> tuple[Gpt, dict[str, Tensor]]:
    """Reads a folder that transformers' `save_pretrained` or `elastrata export` has written.

    Args:
        folder: with config.json and weights of GPT2LMHeadModel, LlamaForCausalLM or
            Qwen3ForCausalLM.

    Returns:
        The workload, and the state dict for its model with as many ids as the folder's model has.

    Raises:
        UserError: the folder holds another kind of model, or one with a part that ours lacks.
    """
    # Imported here: it takes seconds, and workers never import models.
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(folder)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UserError(f"{folder}: a {config.model_type}: expected {', '.join(FAMILIES)}")
    if lacking := family.unsupported(config):
        raise UserError(f"{folder}: workload gpt has no {', '.join(lacking)}")
    workload = Gpt.model_validate(family.from_config(config))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    table = family.counterpart(workload.shape(config.vocab_size))
    return workload, table.to_ours(table.origins, model.state_dict())
