"""Properties of training systems that determine the memory and time of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastrata.parallel.parallelize import DTYPES, Precision
from elastrata.workload.model_spec import LOGITS_AT_ONCE

FP32_BYTES = 4
Sharding = Literal["none", "optimizer", "all"]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A training system. Fields that end in `_bytes` are bytes per number."""

    name: str
    source: str
    sharding: Sharding
    """What data-parallel devices shard: nothing, optimizer states (ZeRO-1), or also parameters and
    gradients (ZeRO-3, FSDP)."""
    flash: bool
    """Whether attention keeps no score matrix and skips causally masked scores."""
    fused: bool
    """Whether neighbouring element-wise operations run as one kernel."""
    dropout: bool
    element_bytes: int
    """Bytes of activations, and of parameters in the computation."""
    gradient_bytes: int
    """Bytes of gradients that accumulate over micro-batches."""
    reduced_bytes: int
    """Bytes of gradients in a reduction."""
    state_bytes: int
    """Bytes of fp32 parameters, optimizer moments and any other state per parameter."""
    overlap: float
    """Share of data-parallel messages that computation of the same duration hides."""
    accumulates: bool
    """Whether gradients are reduced once per step instead of after every micro-batch."""
    whole_logits: bool
    """Whether every tensor-parallel device holds all logits."""
    logit_bytes: int
    """Bytes of a logit and its derivatives in the loss. With fp32 cross-entropy these are the
    softmax and its gradient twice."""
    logits_at_once: int = 0
    """Largest number of logits that take one additional fp32 number each."""
    link_factor: float = 1.0
    """Share of the collectives' rate inside a node that this system reaches."""
    network_factor: float = 1.0
    """Share of the collectives' rate on the network that this system reaches."""
    has_second_moments: bool = True
    """Whether the optimizer keeps second moments of all parameters. Muon has none for the matrices
    of blocks."""
    keeps_gathered: bool = False
    """Whether tokens gathered from other tensor-parallel devices are kept for the backward pass
    instead of gathered again."""
    attention_copies: int = 0
    """Additional copies of attention's result that are kept."""
    equal_stages: bool = False
    """Whether all pipeline stages have equally many blocks. Otherwise their times are balanced,
    including the head's."""
    extra_micro_batches: int = 0
    """Micro-batches that a pipeline stage holds beyond those that the schedule requires."""
    # An allowance, not a measurement.
    fragmentation: float = 0.04
    """Share of allocated memory that is lost to fragmentation in the allocator."""


def engine_stack(precision: Precision, reduced: Precision, *, averages: bool = False) -> Stack:
    """Return this project's engine: FSDP2 with fp32 states. `averages` adds an average of the
    weights."""
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
        logit_bytes=element,  # the loss overwrites logits with their gradients
        logits_at_once=LOGITS_AT_ONCE,
        # torch's tensor parallelism saves the gathered input of a matrix for its weight gradient.
        keeps_gathered=True,
        # In fp32 attention is one dense call for each run of equal lengths, and results are copied.
        attention_copies=1 if precision == "fp32" else 0,
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
