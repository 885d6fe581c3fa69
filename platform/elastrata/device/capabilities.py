"""The capabilities, peak rate and memory of the device of a worker."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from elastrata.device.kernels import has_kernels
from elastrata_pipelines.errors import pluralize

_BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
"""Their names in `torch.cpu.get_capabilities`, on x86 and on ARM."""
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class Peak:
    """The peak rate of matrix products."""

    flops: float
    """Dense FLOP/s."""
    dtype: str
    """Type of the multiplied numbers."""


# Longer names come before their prefixes. Data sheets often list rates of sparse matrices, which
# are halved here. GPUs without a bf16 peak have that of fp16: they compute bf16 more slowly.
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
"""Peaks by whole words of the device's name (an A100 is not an A10); the first match counts."""


@dataclass(frozen=True, kw_only=True)
class DeviceCapabilities:
    """Capabilities of a worker's device and machine that recipes may require."""

    device: str
    """Description for users, such as `this CPU` or `a Tesla T4`."""
    capability: tuple[int, int] | None
    """Compute capability of a CUDA GPU; None for other devices."""
    has_bf16: bool
    """Whether the device has instructions for products in bf16."""
    missing_compiler: str | None
    """Compiler that torch.compile needs but cannot find; None if it finds one."""
    skips_zeros: bool = False
    """Whether semi-structured (2:4) kernels were tried, with correct results."""

    @property
    def can_compile(self) -> bool:
        """Whether torch.compile finds a compiler."""
        return self.missing_compiler is None


def capabilities(device: torch.device, *, tries_kernels: bool = False) -> DeviceCapabilities:
    """Return the capabilities of the device and of this machine.

    Args:
        device: device of this process.
        tries_kernels: whether to try 2:4 kernels on a GPU, which loads a library and computes two
            products.
    """
    if device.type != "cuda":
        return DeviceCapabilities(
            device="this CPU",
            capability=None,
            has_bf16=_cpu_has_bf16(),
            missing_compiler=_missing_compiler(
                "CXX", "clang++" if sys.platform == "darwin" else "g++"
            ),
        )
    capability = torch.cuda.get_device_capability(device)
    return DeviceCapabilities(
        device=f"a {torch.cuda.get_device_name(device)}",
        capability=capability,
        # From Ampere on. PyTorch's own check also accepts emulation.
        has_bf16=capability >= (8, 0),
        # Triton compiles its launchers with a C compiler; on a CPU, torch.compile generates C++.
        missing_compiler=_missing_compiler("CC", "gcc", "clang"),
        skips_zeros=tries_kernels and has_kernels(device),
    )


def _cpu_has_bf16() -> bool:
    available = torch.cpu.get_capabilities()
    return any(available.get(name, False) for name in _BF16_INSTRUCTIONS)


def _missing_compiler(variable: str, *defaults: str) -> str | None:
    """Return the missing compiler, or None if one is on the path.

    Args:
        variable: environment variable that overrides the default compilers.
        defaults: default compilers, any of which is sufficient.
    """
    configured = os.environ.get(variable)
    # The variable may hold a wrapper and options, such as `ccache g++`.
    compilers = tuple(shlex.split(configured)[:1]) if configured else defaults
    return None if any(map(shutil.which, compilers)) else " or ".join(compilers)


def current_device() -> torch.device:
    """Return the GPU assigned to this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True)
class CudaFault:
    """Why PyTorch cannot train on the GPUs of its machine."""

    found: str
    advice: str
    """The remedy."""


def find_cuda_fault() -> CudaFault | None:
    """Return why PyTorch cannot train on GPUs in this process; None if it can."""
    release = torch.__version__.partition("+")[0]
    install = f"pip install --force-reinstall torch=={release}"
    found = f"torch {torch.__version__}"
    # PyTorch for AMD's GPUs has no version of CUDA.
    if torch.version.cuda is None and torch.version.hip is None:
        return CudaFault(f"{found} is built without CUDA", f"install a build with it: {install}")
    if not dist.is_nccl_available():
        return CudaFault(f"{found} is built without NCCL", f"install a build with it: {install}")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().split(". ")[0].splitlines()[0]
        return CudaFault(
            f"{found} cannot use the driver: {reason}",
            f"install a driver for CUDA {torch.version.cuda} or newer, or a build of torch for the "
            "driver that is there",
        )
    return None


@dataclass(frozen=True)
class GpuSupport:
    """What PyTorch can do with the GPUs of a machine."""

    fault: CudaFault | None
    """Why it cannot train on them; None if it can."""
    has_bf16: bool = False
    """Whether all have instructions for products in bf16."""
    can_compile: bool = False
    """Whether torch.compile finds a compiler."""


def probe_gpus() -> GpuSupport:
    """Return what PyTorch can do with the GPUs that this process sees."""
    if fault := find_cuda_fault():
        return GpuSupport(fault)
    found = [capabilities(torch.device("cuda", n)) for n in range(torch.cuda.device_count())]
    return GpuSupport(
        None, all(one.has_bf16 for one in found), all(one.can_compile for one in found)
    )


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or "CPU" with PyTorch's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {pluralize(threads, 'thread')}"


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense bf16 peak in FLOP/s, or None if unknown."""
    return peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_flops_of(name: str) -> float | None:
    """Return the dense bf16 peak in FLOP/s of a GPU by its driver's name for it, or None if
    unknown."""
    words = name.replace("-", " ").split()
    # A slice has the name of the whole GPU, but only a part of its peak.
    if "MIG" in words:
        return None
    padded_name = f" {' '.join(words)} "
    peak = next((peak for family, peak in PEAKS.items() if f" {family} " in padded_name), None)
    return peak.flops if peak and peak.dtype == "bf16" else None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of the GPU since `reset_peak_memory`, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux reports kilobytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device) -> None:
    """Reset `peak_memory_bytes` of a GPU, so that it excludes building and restoring the model."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_of_worker(device: torch.device, per_node: int, most_gb: float | None = None) -> int:
    """Return the number of bytes that this process may use.

    On a GPU, these are its free memory and the memory this process has reserved. On a CPU, they are
    the memory of this process and an equal share of the spare memory of the machine or container.

    Args:
        device: device of this process.
        per_node: number of such processes on the machine.
        most_gb: upper limit in gigabytes; default: no limit.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # PyTorch's cached memory is in use for the driver, but available to this process.
        usable = free + torch.cuda.memory_reserved(device)
    else:
        usable = _resident_bytes() + spare_bytes() // per_node
    return usable if most_gb is None else min(usable, int(most_gb * 1e9))


def _resident_bytes() -> int:
    """Return the memory of this process."""
    if not _STATM.exists():  # not Linux: count nothing
        return 0
    # The second field is the number of resident pages.
    return int(_STATM.read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


def spare_bytes() -> int:
    """Return the bytes of memory that no process uses; all of it if the system does not say."""
    if not _STATM.exists():
        return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    # /proc/meminfo is the machine's even inside of a container.
    return min([1024 * kilobytes, *_spare_of_container()])


def _spare_of_container() -> list[int]:
    """Return the memory left within the container's limit; empty without a limit (cgroups,
    version 2)."""
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
    """Return one line per requested feature that the machine lacks, with the substitute.

    Keys of workloads are handled by `Workload.substitutions`.
    """
    lines = []
    if dtype == torch.bfloat16 and not capabilities.has_bf16:
        lines.append(
            f"precision: bf16: {capabilities.device} has no instructions for it; PyTorch converts "
            "to and from fp32 instead, which is slow"
        )
    if compile and not capabilities.can_compile:
        lines.append(
            f"compile: true: {capabilities.missing_compiler} is not on PATH; operators run one "
            "by one instead"
        )
    if skip_zeros and not capabilities.skips_zeros:
        lines.append(
            f"sparsity.kernels: true: {capabilities.device} has no 2:4 kernels; zeros are "
            "multiplied like other weights"
        )
    return lines
