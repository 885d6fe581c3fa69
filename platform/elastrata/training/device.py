"""The device a worker computes on, and what is known about it."""

from __future__ import annotations

import resource

import torch

PEAK_BF16_FLOPS = {
    "A100": 312e12,  # NVIDIA A100 data sheet, dense
    "H100 PCIe": 756e12,  # NVIDIA H100 data sheet, dense
    "H100": 989e12,  # NVIDIA H100 SXM data sheet, dense
    "H200": 989e12,  # NVIDIA H200 data sheet, dense
}
"""Dense bf16 peak in FLOP/s by a part of the device's name; the first that fits counts."""


def current_device() -> torch.device:
    """The GPU that was assigned to this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU with the threads PyTorch has of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)}"


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16_FLOPS.items() if part in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
