"""Table of devices with the rates of their data sheets, and the reached shares of these rates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastrata.device.capabilities import PEAKS, Peak
from elastrata_pipelines.errors import UserError, suggest_nearest


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, or one CPU core."""

    name: str
    peak: Peak
    memory_bytes: float
    """Bytes visible to PyTorch: the data sheet's memory without the driver's share."""
    memory_bandwidth: float
    """Bytes per second."""
    multiprocessors: int
    tiles: tuple[tuple[int, int, float], ...]
    """Rows, columns and relative rate of the tiles of a matrix product. Each multiprocessor
    computes one tile at a time."""
    link: float
    """Bytes per second, each way, to other devices of a node."""
    link_name: str
    network: float
    """Bytes per second of each device, each way, to other nodes, in typical machines with this
    device."""
    per_node: int
    """Devices of a typical machine."""
    reserved_bytes: float
    """Bytes for the driver, its kernels and the communication library."""
    source: str

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of dense matrix products."""
        return self.peak.flops


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Reached shares of peak rates, and the fixed cost of a message."""

    matmul: float
    """Share of the peak that device-filling matrix products reach. Fitted."""
    memory: float
    """Share of the memory bandwidth that element-wise kernels reach. Fitted."""
    attention: float = 0.6
    """Share of the peak that flash attention reaches (FlashAttention-2, arXiv 2307.08691: 50 to
    73%)."""
    # Eight A100 over NVLink, all-reduce: 232.5 GB/s of 300 (github.com/NVIDIA/nccl-tests, issue
    # 175).
    link: float = 0.75
    """Share of the link in a node that collectives reach."""
    # Nodes of eight A100 with four cards of 200 Gbit/s, all-reduce: 85 to 91 GB/s of 100
    # (github.com/NVIDIA/nccl-tests, issues 100, 119 and 175). The default is lower because larger
    # networks are shared.
    network: float = 0.8
    """Share of the network that collectives reach."""
    message_seconds: float = 20e-6
    """Latency of a message: the launch of the kernel and the way through a ring."""


GPU_PRIOR = Efficiency(matmul=0.75, memory=0.75)
"""Values before any fit."""
GPU = replace(GPU_PRIOR, matmul=0.741, memory=0.735)
"""Values fitted on four rows of Megatron-LM's table 1; see
tests/platform_/test_planner_published.py."""
CPU = Efficiency(matmul=0.6, memory=0.6, attention=0.3, link=0.5, network=0.5, message_seconds=5e-4)
"""Estimates, not fitted, for one core among other busy ones."""


_GB = 1e9
_GIB = 2**30
# Smaller tiles read more bytes for each product (NVIDIA, Matrix Multiplication Background User's
# Guide, section 3).
_TENSOR_CORE_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75))
"""Largest tiles of cuBLAS."""
_SMALL_TILES = ((128, 128, 1.0), (128, 64, 0.85))

DEVICES = {
    device.name: device
    for device in (
        Device(
            name="A100-80GB",
            peak=PEAKS["A100"],
            memory_bytes=79.2 * _GIB,
            memory_bandwidth=2039 * _GB,
            multiprocessors=108,
            tiles=_TENSOR_CORE_TILES,
            link=300 * _GB,
            link_name="NVLink 3",
            network=25 * _GB,
            per_node=8,
            reserved_bytes=1.5 * _GIB,
            source="NVIDIA A100 data sheet (SXM); DGX A100 data sheet: 8 x 200 Gbit/s",
        ),
        Device(
            name="A100-40GB",
            peak=PEAKS["A100"],
            memory_bytes=39.4 * _GIB,
            memory_bandwidth=1555 * _GB,
            multiprocessors=108,
            tiles=_TENSOR_CORE_TILES,
            link=300 * _GB,
            link_name="NVLink 3",
            network=25 * _GB,
            per_node=8,
            reserved_bytes=1.5 * _GIB,
            source="NVIDIA A100 data sheet (SXM); DGX A100 data sheet: 8 x 200 Gbit/s",
        ),
        Device(
            name="H100-80GB",
            peak=PEAKS["H100"],
            memory_bytes=79.1 * _GIB,
            memory_bandwidth=3350 * _GB,
            multiprocessors=132,
            tiles=_TENSOR_CORE_TILES,
            link=450 * _GB,
            link_name="NVLink 4",
            network=50 * _GB,
            per_node=8,
            reserved_bytes=1.5 * _GIB,
            source="NVIDIA H100 data sheet (SXM); DGX H100 data sheet: 8 x 400 Gbit/s",
        ),
        Device(
            name="H200",
            peak=PEAKS["H200"],
            memory_bytes=139.8 * _GIB,
            memory_bandwidth=4800 * _GB,
            multiprocessors=132,
            tiles=_TENSOR_CORE_TILES,
            link=450 * _GB,
            link_name="NVLink 4",
            network=50 * _GB,
            per_node=8,
            reserved_bytes=1.5 * _GIB,
            source="NVIDIA H200 data sheet (SXM); DGX H200 data sheet: 8 x 400 Gbit/s",
        ),
        Device(
            name="B200",
            peak=PEAKS["B200"],
            memory_bytes=178.3 * _GIB,
            memory_bandwidth=7700 * _GB,
            multiprocessors=148,
            tiles=_TENSOR_CORE_TILES,
            link=900 * _GB,
            link_name="NVLink 5",
            network=50 * _GB,
            per_node=8,
            reserved_bytes=1.5 * _GIB,
            source="NVIDIA HGX B200 data sheet; DGX B200 data sheet: 8 x 400 Gbit/s",
        ),
        Device(
            name="L40S",
            peak=PEAKS["L40S"],
            memory_bytes=44.4 * _GIB,
            memory_bandwidth=864 * _GB,
            multiprocessors=142,
            tiles=_TENSOR_CORE_TILES,
            link=31.5 * _GB,
            link_name="PCIe 4 x16",
            network=25 * _GB,
            per_node=8,
            reserved_bytes=1.0 * _GIB,
            source="NVIDIA L40S data sheet; OVX data sheet: 8 x 200 Gbit/s",
        ),
        Device(
            name="A10",
            peak=PEAKS["A10"],
            memory_bytes=22.0 * _GIB,
            memory_bandwidth=600 * _GB,
            multiprocessors=72,
            tiles=_TENSOR_CORE_TILES,
            link=31.5 * _GB,
            link_name="PCIe 4 x16",
            network=3.125 * _GB,
            per_node=4,
            reserved_bytes=1.0 * _GIB,
            source="NVIDIA A10 data sheet; 100 Gbit/s for 4 GPUs, as cloud machines have",
        ),
        Device(
            name="MI300X",
            peak=PEAKS["MI300X"],
            memory_bytes=191.5 * _GIB,
            memory_bandwidth=5300 * _GB,
            multiprocessors=304,
            tiles=_TENSOR_CORE_TILES,
            link=448 * _GB,
            link_name="Infinity Fabric",
            network=50 * _GB,
            per_node=8,
            reserved_bytes=1.5 * _GIB,
            source="AMD Instinct MI300X data sheet: 7 links of 64 GB/s; 8 x 400 Gbit/s",
        ),
        Device(
            name="V100-32GB",
            peak=PEAKS["V100"],
            memory_bytes=31.7 * _GIB,
            memory_bandwidth=900 * _GB,
            multiprocessors=80,
            tiles=_SMALL_TILES,
            link=150 * _GB,
            link_name="NVLink 2",
            network=6.25 * _GB,
            per_node=8,
            reserved_bytes=1.0 * _GIB,
            source="NVIDIA V100 data sheet (SXM2); DGX-1 data sheet: 4 x 100 Gbit/s for 8 GPUs",
        ),
        Device(
            name="V100-16GB",
            peak=PEAKS["V100"],
            memory_bytes=15.8 * _GIB,
            memory_bandwidth=900 * _GB,
            multiprocessors=80,
            tiles=_SMALL_TILES,
            link=150 * _GB,
            link_name="NVLink 2",
            network=6.25 * _GB,
            per_node=8,
            reserved_bytes=1.0 * _GIB,
            source="NVIDIA V100 data sheet (SXM2); DGX-1 data sheet: 4 x 100 Gbit/s for 8 GPUs",
        ),
        Device(
            name="T4",
            peak=PEAKS["T4"],
            memory_bytes=14.6 * _GIB,
            memory_bandwidth=320 * _GB,
            multiprocessors=40,
            tiles=_SMALL_TILES,
            link=15.75 * _GB,
            link_name="PCIe 3 x16",
            network=1.5625 * _GB,
            per_node=4,
            reserved_bytes=0.7 * _GIB,
            source="NVIDIA T4 data sheet; 50 Gbit/s for 4 GPUs, as cloud machines have",
        ),
        Device(
            name="CPU",
            peak=Peak(80e9, "fp32"),
            memory_bytes=4 * _GIB,
            memory_bandwidth=10 * _GB,
            multiprocessors=1,
            tiles=((1, 1, 1.0),),
            link=2 * _GB,
            link_name="gloo over loopback",
            network=1.25 * _GB,
            per_node=2,
            reserved_bytes=0.3 * _GIB,
            source="one core at 2.5 GHz with two AVX2 multiply-add units: 32 FLOPs a cycle",
        ),
    )
}
"""Devices by name."""

ALIASES = {"A100": "A100-80GB", "H100": "H100-80GB", "V100": "V100-32GB"}

_MIG_PROFILES = {
    "A100-40GB": (14, ("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb")),
    "A100-80GB": (14, ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb")),
    "H100-80GB": (16, ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb")),
    "H200": (16, ("1g.18gb", "2g.35gb", "3g.71gb", "4g.71gb")),
}
"""Multiprocessors for each `g`, and MIG profiles, by device (NVIDIA MIG User Guide)."""
_MEMORY_EIGHTHS = {"1g": 1, "2g": 2, "3g": 4, "4g": 4}
"""Eighths of the device's memory in each profile."""


def _build_slice(device: Device, cores: int, profile: str) -> Device:
    """Return a MIG slice of a device, such as `H100-80GB-3g.40gb`."""
    compute = profile.partition(".")[0]
    multiprocessors, share = cores * int(compute[0]), _MEMORY_EIGHTHS[compute] / 8
    flops = device.peak_flops * multiprocessors / device.multiprocessors
    return replace(
        device,
        name=f"{device.name}-{profile}",
        peak=Peak(flops, device.peak.dtype),
        memory_bytes=device.memory_bytes * share,
        memory_bandwidth=device.memory_bandwidth * share,
        multiprocessors=multiprocessors,
        # NCCL cannot connect two slices of a machine, so each counts as alone on its node.
        per_node=1,
    )


SLICES = {
    one.name: one
    for name, (cores, profiles) in _MIG_PROFILES.items()
    for profile in profiles
    for one in [_build_slice(DEVICES[name], cores, profile)]
}
"""MIG slices by name."""
NAMES = (*DEVICES, *ALIASES, *SLICES)


def find_device(name: str) -> Device:
    """Return the device or slice with a name or alias, in any case.

    Raises:
        UserError: no device has that name.
    """
    canonical_names = {one.lower(): ALIASES.get(one, one) for one in NAMES}
    canonical_name = canonical_names.get(name.lower())
    if canonical_name is None:
        hint = suggest_nearest(name.upper(), [*DEVICES, *ALIASES])
        raise UserError(f"{name}: no such device{hint}; known: {', '.join(DEVICES)}")
    return (DEVICES | SLICES)[canonical_name]


def match_device(name: str) -> Device:
    """Return the device or slice that a driver's name such as `NVIDIA A100-SXM4-40GB MIG 3g.20gb`
    denotes, or an A100 for an unknown name.

    Args:
        name: name by PyTorch; `CPU` for any CPU.
    """
    # Whole words are compared because "A10" is a prefix of "A100".
    words = name.upper().replace("-", " ").split()
    family = [device for key, device in DEVICES.items() if key.split("-")[0] in words]
    sized = [device for device in family if device.name.split("-")[-1] in words]
    device = (sized or family or [DEVICES["A100-80GB"]])[0]
    return SLICES.get(f"{device.name}-{words[-1].lower()}", device) if words else device
