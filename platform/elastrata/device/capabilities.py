"""The device a worker computes on, and what is known about it."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from elastrata.device.kernels import has_kernels

_BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
"""By the names that `torch.cpu.get_capabilities` has for them, on x86 and on ARM."""
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class Peak:
    """The peak rate of matrix products."""

    flops: float
    """Dense, per second."""
    dtype: str
    """The type of the numbers that are multiplied."""


PEAKS = {
    "A10": Peak(125e12, "bf16"),  # NVIDIA A10 data sheet
    "A10G": Peak(70e12, "bf16"),  # NVIDIA A10G data sheet
    "A100": Peak(312e12, "bf16"),  # NVIDIA A100 data sheet
    "L40S": Peak(362e12, "bf16"),  # NVIDIA L40S data sheet
    "H100 PCIe": Peak(756e12, "bf16"),  # NVIDIA H100 data sheet
    "H100 NVL": Peak(835e12, "bf16"),  # NVIDIA H100 data sheet
    "H100": Peak(989e12, "bf16"),  # NVIDIA H100 SXM data sheet
    "H200 NVL": Peak(835e12, "bf16"),  # NVIDIA H200 data sheet
    "H200": Peak(989e12, "bf16"),  # NVIDIA H200 data sheet
    "GH200": Peak(990e12, "bf16"),  # NVIDIA GH200 data sheet
    "B200": Peak(2250e12, "bf16"),  # NVIDIA HGX B200 data sheet: 36 PFLOP/s, 8 GPUs, with sparsity
    "GB200": Peak(2500e12, "bf16"),  # NVIDIA GB200 NVL72 data sheet: 360 PFLOP/s, 72 GPUs, likewise
    "MI300A": Peak(980.6e12, "bf16"),  # AMD Instinct MI300A data sheet
    "MI300X": Peak(1307.4e12, "bf16"),  # AMD Instinct MI300X data sheet
    "V100": Peak(125e12, "fp16"),  # NVIDIA V100 data sheet (SXM2)
    "T4": Peak(65e12, "fp16"),  # NVIDIA T4 data sheet
}
"""By whole words of the device's name (an A100 is no A10); the first that fits counts. Half of what
data sheets say of sparse matrices. A peak without bf16 is fp16's: these devices compute bf16
slower."""


@dataclass(frozen=True, kw_only=True)
class DeviceCapabilities:
    """Abilities of a worker's device and its machine, as far as recipes may ask for more."""

    device: str
    """In words: `this CPU`, `a Tesla T4`."""
    capability: tuple[int, int] | None
    """Compute capability of a CUDA GPU; None: it is none."""
    has_bf16: bool
    """Whether there are instructions that multiply bf16."""
    missing_compiler: str | None
    """The compiler that torch.compile needs and does not find; None where nothing is missing."""
    skips_zeros: bool = False
    """Whether semi-structured (2:4) kernels were tried, and multiply as they should."""

    @property
    def can_compile(self) -> bool:
        """Whether torch.compile finds what it needs."""
        return self.missing_compiler is None


def capabilities(device: torch.device, *, tries_kernels: bool = False) -> DeviceCapabilities:
    """Looks at the device and at the machine that this process runs on.

    Args:
        device: of this process.
        tries_kernels: whether 2:4 kernels are tried, where there are any: a library is loaded and
            two products are computed for it.
    """
    if device.type != "cuda":
        return DeviceCapabilities(
            device="this CPU",
            capability=None,
            has_bf16=_cpu_has_bf16(),
            missing_compiler=_missing("CXX", "clang++" if sys.platform == "darwin" else "g++"),
        )
    capability = torch.cuda.get_device_capability(device)
    return DeviceCapabilities(
        device=f"a {torch.cuda.get_device_name(device)}",
        capability=capability,
        has_bf16=capability >= (8, 0),
        missing_compiler=_missing("CC", "gcc", "clang"),
        skips_zeros=tries_kernels and has_kernels(device),
    )


def _cpu_has_bf16() -> bool:
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in _BF16_INSTRUCTIONS)


def _missing(variable: str, *usual: str) -> str | None:
    """The compiler that the environment's variable names, or else each of the usual ones, where
    none of them is on the path."""
    named = os.environ.get(variable)
    wanted = (named,) if named else usual
    return None if any(map(shutil.which, wanted)) else " or ".join(wanted)


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
    return named_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def named_peak_flops(name: str) -> float | None:
    """The dense bf16 peak in FLOP/s of a GPU that its driver calls `name`; None where it is not
    known, as of a slice (MIG), which bears the name of the whole device."""
    words = name.replace("-", " ").split()
    if "MIG" in words:
        return None
    there = f" {' '.join(words)} "
    peak = next((peak for family, peak in PEAKS.items() if f" {family} " in there), None)
    return peak.flops if peak and peak.dtype == "bf16" else None


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: of the GPU since `forget_peak`, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak(device: torch.device) -> None:
    """From now on `peak_memory_bytes` of a GPU leaves out what was in use before: what training
    needs, and neither what building a model nor what reading its state took."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_of_worker(device: torch.device, per_node: int, most_gb: float | None = None) -> int:
    """Bytes that this process may have in use: all that its GPU has and nobody else uses; without
    one, what it has already and an equal share of what the machine, or its container, has to spare.

    Args:
        device: of this process.
        per_node: processes like this one on the machine.
        most_gb: not more than so many gigabytes; default: no limit.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        usable = free + torch.cuda.memory_reserved(device)
    else:
        usable = _resident_bytes() + spare_bytes() // per_node
    return usable if most_gb is None else min(usable, int(most_gb * 1e9))


def _resident_bytes() -> int:
    """Memory of this process."""
    if not _STATM.exists():  # no Linux: what it has is counted as if it had nothing yet
        return 0
    return int(_STATM.read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


def spare_bytes() -> int:
    """Return the bytes of memory that no process uses; all of it if the system does not say."""
    if not _STATM.exists():
        return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min([1024 * kilobytes, *_spare_of_container()])


def _spare_of_container() -> list[int]:
    """The memory that the container's limit leaves, where there is one (cgroups, version 2)."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="utf-8").strip()
        used = int((folder / "memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [] if limit == "max" else [max(0, int(limit) - used)]


def substitutions(
    capabilities: DeviceCapabilities, *, dtype: torch.dtype, compile: bool, skip_zeros: bool = False
) -> list[str]:
    """One line for each; empty where there is all that is asked for.

    Workloads have keys of their own, and `Workload.substitutions` for them."""
    lines = []
    if dtype == torch.bfloat16 and not capabilities.has_bf16:
        lines.append(
            f"precision: bf16: {capabilities.device} has no instructions for it; PyTorch converts "
            "to and from fp32 instead, which is slow"
        )
    if compile and not capabilities.can_compile:
        lines.append(
            f"compile: true: {capabilities.missing_compiler} is not on the path; operators run one "
            "by one instead"
        )
    if skip_zeros and not capabilities.skips_zeros:
        lines.append(
            f"sparsity.kernels: true: {capabilities.device} has no 2:4 kernels; zeros are "
            "multiplied like other weights"
        )
    return lines
