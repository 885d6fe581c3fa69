"""A device and its links: what a data sheet says, and what of it is reached."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastrata.core.device import Peak


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, or one CPU core."""

    name: str
    peak: Peak
    memory_bytes: float
    """Bytes that PyTorch sees: less than the data sheet says, by what the driver keeps."""
    memory_bandwidth: float
    """Bytes per second."""
    multiprocessors: int
    tiles: tuple[tuple[int, int, float], ...]
    """Rows and columns of the parts that a matrix product is cut into, one for each
    multiprocessor at a time, with the rate relative to the best of them."""
    link: float
    """Bytes per second, each way, to the other devices of a node."""
    link_name: str
    network: float
    """Bytes per second, each way, for each device, to other nodes, as machines with it usually
    have."""
    per_node: int
    """Devices in such a machine."""
    reserved_bytes: float
    """For the driver, its kernels and the communication library."""
    source: str

    @property
    def peak_flops(self) -> float:
        """Dense matrix products per second."""
        return self.peak.flops


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of peak rates, and what every message costs whatever its size."""

    matmul: float
    """Share of the peak, by matrix products that fill the device. Fitted."""
    memory: float
    """Share of the memory's bandwidth, by element-wise kernels. Fitted."""
    attention: float = 0.6
    """Share of the peak, by flash attention (FlashAttention-2, arXiv 2307.08691: 50 to 73%)."""
    link: float = 0.75
    """Share of the link in a node, by collectives (eight A100 over NVLink, all-reduce: 232.5 GB/s
    of 300; github.com/NVIDIA/nccl-tests, issue 175)."""
    network: float = 0.8
    """Share of the network, by collectives (nodes of eight A100 with four cards of 200 Gbit/s,
    all-reduce: 85 to 91 GB/s of 100; github.com/NVIDIA/nccl-tests, issues 100, 119 and 175). Less
    is counted on, as larger networks are shared."""
    message_seconds: float = 20e-6
    """Before a message's first byte: the launch of a kernel, and its way through a ring."""


GPU_PRIOR = Efficiency(matmul=0.75, memory=0.75)
"""Before any fit."""
GPU = replace(GPU_PRIOR, matmul=0.741, memory=0.735)
"""Fitted on four rows of Megatron-LM's table 1; tests/platform_/test_planner_published.py."""
CPU = Efficiency(matmul=0.6, memory=0.6, attention=0.3, link=0.5, network=0.5, message_seconds=5e-4)
"""Nothing fitted: of a core among others, as they come."""
