"""Devices by name, from their data sheets, and the share of their rates that is reached."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastrata.device.capabilities import PEAKS, Peak
from elastrata_pipelines.errors import UserError, nearest


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


_GB = 1e9
_GIB = 2**30
_TENSOR_CORE_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75))
"""The largest tiles of cuBLAS; smaller ones read more bytes for each product
(NVIDIA, Matrix Multiplication Background User's Guide, section 3)."""
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
"""By name."""

ALIASES = {"A100": "A100-80GB", "H100": "H100-80GB", "V100": "V100-32GB"}

_SLICED = {
    "A100-40GB": (14, ("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb")),
    "A100-80GB": (14, ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb")),
    "H100-80GB": (16, ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb")),
    "H200": (16, ("1g.18gb", "2g.35gb", "3g.71gb", "4g.71gb")),
}
"""Devices that MIG slices: multiprocessors for each `g`, and profiles (NVIDIA MIG User Guide)."""
_EIGHTHS = {"1g": 1, "2g": 2, "3g": 4, "4g": 4}
"""Parts of the memory that a profile has."""


def _slice(device: Device, cores: int, profile: str) -> Device:
    """A slice, such as `H100-80GB-3g.40gb`: NCCL joins none of a machine, so it is counted as alone
    there."""
    compute = profile.partition(".")[0]
    multiprocessors, share = cores * int(compute[0]), _EIGHTHS[compute] / 8
    flops = device.peak_flops * multiprocessors / device.multiprocessors
    return replace(
        device,
        name=f"{device.name}-{profile}",
        peak=Peak(flops, device.peak.dtype),
        memory_bytes=device.memory_bytes * share,
        memory_bandwidth=device.memory_bandwidth * share,
        multiprocessors=multiprocessors,
        per_node=1,
    )


SLICES = {
    one.name: one
    for name, (cores, profiles) in _SLICED.items()
    for profile in profiles
    for one in [_slice(DEVICES[name], cores, profile)]
}
"""By name."""
NAMES = (*DEVICES, *ALIASES, *SLICES)


def device_named(name: str) -> Device:
    """A device of the table, or a slice of one, by its name in any case or by a short one.

    Raises:
        UserError: there is none.
    """
    known = {one.lower(): ALIASES.get(one, one) for one in NAMES}
    known_name = known.get(name.lower())
    if known_name is None:
        hint = nearest(name.upper(), [*DEVICES, *ALIASES])
        raise UserError(f"{name}: no such device{hint}; known: {', '.join(DEVICES)}")
    return (DEVICES | SLICES)[known_name]


def device_like(name: str) -> Device:
    """The device of the table, or the slice of one, that a driver's name for it means, such as
    `NVIDIA A100-SXM4-40GB MIG 3g.20gb`; that of an A100 for one that is not in it.

    Args:
        name: as PyTorch has it; `CPU` for any CPU.
    """
    words = name.upper().replace("-", " ").split()  # whole ones: an A100 is no A10
    family = [device for key, device in DEVICES.items() if key.split("-")[0] in words]
    sized = [device for device in family if device.name.split("-")[-1] in words]
    device = (sized or family or [DEVICES["A100-80GB"]])[0]
    return SLICES.get(f"{device.name}-{words[-1].lower()}", device) if words else device
