"""What training systems do, as far as the memory and time of a step depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Sharding = Literal["none", "optimizer", "all"]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A training system. Bytes are per number."""

    name: str
    source: str
    sharding: Sharding
    """What data-parallel devices divide among them: nothing, the optimizer's states (ZeRO-1), or
    parameters and gradients as well (ZeRO-3, FSDP)."""
    flash: bool
    """Whether attention keeps no matrix of scores, and skips what causality masks."""
    fused: bool
    """Whether neighbouring element-wise operations are one kernel."""
    dropout: bool
    element_bytes: int
    """Of activations and of parameters as they are applied."""
    gradient_bytes: int
    """Of gradients as they are added up over micro-batches."""
    reduced_bytes: int
    """Of gradients as they travel."""
    state_bytes: int
    """Of everything the optimizer keeps and updates: fp32 parameters, moments, and with sharding
    `all` the reduced gradient."""
    overlapped: bool
    """Whether data-parallel messages travel while the model is computed."""
    accumulates: bool
    """Whether gradients are reduced once a step, not after every micro-batch."""
    whole_logits: bool
    """Whether every tensor-parallel device has all logits."""
    logit_bytes: int
    """Of a logit with all that the loss keeps and makes of it."""
    network_factor: float = 1.0
    """Of the network's rate, what its sharded gathers reach."""


def elastrata(precision: Literal["fp32", "bf16"], reduced: Literal["fp32", "bf16"]) -> Stack:
    """This project's engine: FSDP2, states in fp32."""
    element = 4 if precision == "fp32" else 2
    return Stack(
        name="elastrata",
        source="training/parallel.py",
        sharding="all",
        flash=True,
        fused=False,
        dropout=False,
        element_bytes=element,
        gradient_bytes=4,
        reduced_bytes=4 if reduced == "fp32" else 2,
        state_bytes=16,
        overlapped=True,
        accumulates=True,
        whole_logits=True,
        logit_bytes=element + 8,
    )


MEGATRON_2021 = Stack(
    name="Megatron-LM, 2021",
    source="arXiv 2104.04473: fp16, fused kernels of section 4.2, no overlap of the gradients",
    sharding="none",
    flash=False,
    fused=True,
    dropout=True,
    element_bytes=2,
    gradient_bytes=2,
    reduced_bytes=2,
    state_bytes=12,
    overlapped=False,
    accumulates=True,
    whole_logits=False,
    logit_bytes=10,
)
ZERO3_2021 = Stack(
    name="DeepSpeed ZeRO-3, 2021",
    source="arXiv 2104.04473, section 5.2: the same kernels, everything sharded",
    sharding="all",
    flash=False,
    fused=True,
    dropout=True,
    element_bytes=2,
    gradient_bytes=2,
    reduced_bytes=2,
    state_bytes=14,
    overlapped=True,
    accumulates=False,
    whole_logits=True,
    logit_bytes=10,
    network_factor=0.1,
)
ALEPH_ALPHA_2023 = Stack(
    name="AA-Scaling, 2023",
    source="arXiv 2311.05610: bf16, FlashAttention-2, fused RMSNorm, ZeRO-1",
    sharding="optimizer",
    flash=True,
    fused=False,
    dropout=False,
    element_bytes=2,
    gradient_bytes=2,
    reduced_bytes=2,
    state_bytes=12,
    overlapped=False,
    accumulates=True,
    whole_logits=True,
    logit_bytes=28,
)
