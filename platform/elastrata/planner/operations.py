"""Seconds of single operations on a cluster: kernels by their shapes, messages by size and link.

Messages go around rings, as NCCL has them for large ones: of n devices each sends (n - 1) / n of
the bytes for a gather or a scatter, twice that for a sum that all get (Patarasu and Yuan 2009).
"""

from __future__ import annotations

import math
from functools import cache

from elastrata.planner.cluster import Cluster
from elastrata.planner.hardware import Device, Efficiency

_FILLING = 128
"""Products along the inner dimension that a tile takes to get going and to be written: the depth
of cuBLAS' pipeline of loads, with its epilogue."""


@cache
def shape_efficiency(device: Device, rows: int, columns: int, inner: int, count: int = 1) -> float:
    """Rate of a matrix product over that of one that fills the device.

    A product is cut into tiles, a multiprocessor computes one at a time: tiles that hang over the
    edge, and a last wave with fewer tiles than multiprocessors, are lost. The best of the known
    tiles counts.

    Args:
        device: it is computed on.
        rows: of the result.
        columns: of the result.
        inner: length of the sums.
        count: products that are computed together.
    """
    best = 0.0
    for height, width, rate in device.tiles:
        tiles = count * math.ceil(rows / height) * math.ceil(columns / width)
        waves = math.ceil(tiles / device.multiprocessors)
        filled = count * rows * columns / (waves * device.multiprocessors * height * width)
        best = max(best, rate * filled)
    if device.multiprocessors == 1:
        return 1.0
    return best * inner / (inner + _FILLING)


@cache
def matmul_seconds(
    device: Device,
    efficiency: Efficiency,
    shape: tuple[int, int, int],
    element_bytes: int,
    count: int = 1,
) -> float:
    """Seconds of `count` products [rows, inner] x [inner, columns]: of arithmetic, or of reads and
    write, whichever takes longer (the roofline of Williams et al. 2009).

    Args:
        device: it is computed on.
        efficiency: what of its rates is reached.
        shape: rows, columns, inner.
        element_bytes: of each number.
        count: products that are computed together.
    """
    rows, columns, inner = shape
    rate = (
        device.peak_flops
        * efficiency.matmul
        * shape_efficiency(device, rows, columns, inner, count)
    )
    numbers = rows * inner + inner * columns + rows * columns
    arithmetic = 2 * count * rows * columns * inner / rate
    return max(arithmetic, traffic_seconds(device, efficiency, count * numbers * element_bytes))


def traffic_seconds(device: Device, efficiency: Efficiency, num_bytes: float) -> float:
    """Seconds of element-wise kernels that read and write so many bytes."""
    return num_bytes / (device.memory_bandwidth * efficiency.memory)


def gather_seconds(
    cluster: Cluster, efficiency: Efficiency, num_bytes: float, size: int, stride: int
) -> float:
    """Seconds of an all-gather, or of a reduce-scatter.

    Args:
        cluster: whose links it uses.
        efficiency: what of their rates is reached.
        num_bytes: of the whole, in the end or at the start.
        size: devices that take part.
        stride: devices from one of them to the next.
    """
    if size == 1 or not num_bytes:
        return 0.0
    is_inside = cluster.is_inside_node(size, stride)
    share = efficiency.link if is_inside else efficiency.network
    rate = cluster.bus(size, stride) * share
    return efficiency.message_seconds + num_bytes * (size - 1) / size / rate


def sum_seconds(
    cluster: Cluster, efficiency: Efficiency, num_bytes: float, size: int, stride: int
) -> float:
    """Seconds of an all-reduce."""
    return 2 * gather_seconds(cluster, efficiency, num_bytes, size, stride)


def neighbour_seconds(
    cluster: Cluster, efficiency: Efficiency, num_bytes: float, tensor: int, stride: int
) -> float:
    """Seconds of the message from one stage of a pipeline to the next.

    Tensor-parallel devices send a part each and gather the whole on arrival (arXiv 2104.04473,
    section 4.1).

    Args:
        cluster: whose links it uses.
        efficiency: what of their rates is reached.
        num_bytes: of the micro-batch's hidden states.
        tensor: tensor-parallel devices.
        stride: devices from one stage to the next.
    """
    is_inside = cluster.is_inside_node(2, stride)
    if is_inside:
        rate = cluster.device.link * efficiency.link
    else:
        rate = cluster.device.network * efficiency.network
    sent = efficiency.message_seconds + num_bytes / tensor / rate
    return sent + gather_seconds(cluster, efficiency, num_bytes, tensor, 1)
