"""Training systems, as far as the memory and time of a step depend on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastrata.parallel.parallelize import DTYPES, Precision
from elastrata.workload.model_spec import LOGITS_AT_ONCE

FP32_BYTES = 4
Sharding = Literal["none", "optimizer", "all"]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A training system. Bytes are per number."""

    name: str
    source: str
    sharding: Sharding
    """Divided among data-parallel devices: nothing, the optimizer's states (ZeRO-1), or
    parameters and gradients as well (ZeRO-3, FSDP)."""
    flash: bool
    """Whether attention keeps no matrix of scores, and skips what causality masks."""
    fused: bool
    """Whether neighbouring element-wise operations are one kernel."""
    dropout: bool
    element_bytes: int
    """Activations, and parameters as they are applied."""
    gradient_bytes: int
    """Gradients as they are added up over micro-batches."""
    reduced_bytes: int
    """Gradients as they travel."""
    state_bytes: int
    """Everything the optimizer keeps: fp32 parameters and moments; and what else is kept of every
    parameter."""
    overlap: float
    """Share of data-parallel messages that computation hides, as far as it takes as long."""
    accumulates: bool
    """Whether gradients are reduced once a step, not after every micro-batch."""
    whole_logits: bool
    """Whether every tensor-parallel device has all logits."""
    logit_bytes: int
    """A logit with all that the loss keeps and makes of it at once: for cross-entropy in fp32
    the softmax, and its gradient twice."""
    logits_at_once: int = 0
    """So many logits, where there are more, take one fp32 number each beside that."""
    link_factor: float = 1.0
    """Share of the rate of collectives inside a node that this system reaches."""
    network_factor: float = 1.0
    """Likewise on the network."""
    has_second_moments: bool = True
    """Whether the optimizer keeps one of every number; Muon has none of blocks' matrices."""
    keeps_gathered: bool = False
    """Whether tokens that tensor-parallel devices have gathered from each other are kept for the
    backward pass, not gathered again."""
    attention_copies: int = 0
    """Copies of attention's result that are kept beside it."""
    equal_stages: bool = False
    """Whether all stages of a pipeline have as many blocks, whatever the head costs; else they take
    about as long as each other."""
    extra_micro_batches: int = 0
    """Micro-batches that a stage of a pipeline holds beyond those it must."""
    fragmentation: float = 0.04
    """Share of allocated memory that the allocator cannot use for requests of other sizes. An
    allowance, not a measurement."""


def elastrata(precision: Precision, reduced: Precision, *, averages: bool = False) -> Stack:
    """This project's engine: FSDP2, states in fp32; `averages`: of the weights, too."""
    element = DTYPES[precision].itemsize
    return Stack(
        name="elastrata",
        source="parallel/parallelize.py",
        sharding="all",
        flash=True,
        fused=False,
        dropout=False,
        element_bytes=element,
        gradient_bytes=4,
        reduced_bytes=DTYPES[reduced].itemsize,
        state_bytes=12 + (4 if averages else 0),
        overlap=0.9,
        accumulates=True,
        whole_logits=False,
        logit_bytes=element,  # the gradient is written over it
        logits_at_once=LOGITS_AT_ONCE,
        keeps_gathered=True,  # by torch's tensor parallelism
        attention_copies=1 if precision == "fp32" else 0,  # one dense call for each run of lengths
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
    overlap=0.0,
    accumulates=True,
    whole_logits=False,
    logit_bytes=10,
    equal_stages=True,
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
    state_bytes=12,
    overlap=0.65,
    accumulates=False,
    whole_logits=True,
    logit_bytes=10,
    network_factor=0.11,
    equal_stages=True,
)
ALEPH_ALPHA_2023 = Stack(
    name="AA-Scaling, 2023",
    source="arXiv 2311.05610: bf16, FlashAttention-2, fused RMSNorm, ZeRO-1",
    sharding="optimizer",
    flash=True,
    fused=True,
    dropout=False,
    element_bytes=2,
    gradient_bytes=2,
    reduced_bytes=2,
    state_bytes=12,
    overlap=0.0,
    accumulates=True,
    whole_logits=True,
    logit_bytes=24,
    link_factor=0.55,
    network_factor=0.075,
    extra_micro_batches=1,
    fragmentation=0.0,
    equal_stages=True,
)
