"""Qwen3 (Yang et al. 2025, arXiv 2505.09388) as transformers has it, to and from ours: a Llama
without biases whose queries and keys are normalised, head by head."""

from __future__ import annotations

from typing import Any

from elastrata.core.counterpart import Counterpart
from elastrata_workloads.gpt import llama
from elastrata_workloads.gpt.shape import GptShape

ARCHITECTURE, CONFIG = "Qwen3ForCausalLM", "Qwen3Config"

_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
"""Names within a block that Llama has not: ours and theirs."""


def differences(shape: GptShape) -> list[str]:
    """Recipe keys with values that Qwen3 cannot have; empty: the shape is a Qwen3."""
    without_norms = [key for key in llama.differences(shape) if not key.startswith("qk_norm")]
    own = {"qk_norm: false": not shape.qk_norm, "bias: true": shape.bias}
    return [*without_norms, *(key for key, differs in own.items() if differs)]


def to_config(shape: GptShape) -> dict[str, Any]:
    """The arguments of transformers' Qwen3Config."""
    values = llama.to_config(shape)
    del values["mlp_bias"]
    return {**values, "head_dim": shape.head_size}


def from_config(config: Any) -> dict[str, Any]:
    """The settings of the workload `gpt` for a Qwen3Config."""
    return {**llama.from_config(config), "qk_norm": True}


def unsupported(config: Any) -> list[str]:
    """Parts that a Qwen3Config asks for and our model does not have; empty: it has all."""
    lacks = llama.unsupported(config)
    return [*lacks, "use_sliding_window"] if config.use_sliding_window else lacks


def counterpart(shape: GptShape) -> Counterpart:
    """Where our parameters lie in it: the same tensors under other names."""
    return llama.counterpart(shape, _NORMS)
