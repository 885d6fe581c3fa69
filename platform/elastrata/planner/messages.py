"""Seconds of messages, by collective, size and link.

Rings, as NCCL has them for large messages: of n devices each sends (n - 1) / n of the bytes for a
gather or a scatter, twice that for a sum that all get (Patarasu and Yuan 2009).
"""

from __future__ import annotations

from elastrata.planner.cluster import Cluster
from elastrata.planner.efficiency import Efficiency


def gather_seconds(
    cluster: Cluster, efficiency: Efficiency, num_bytes: float, size: int, stride: int
) -> float:
    """Of an all-gather, or of a reduce-scatter.

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
    """Of an all-reduce."""
    return 2 * gather_seconds(cluster, efficiency, num_bytes, size, stride)


def neighbour_seconds(
    cluster: Cluster, efficiency: Efficiency, num_bytes: float, tensor: int, stride: int
) -> float:
    """Of what one stage of a pipeline hands to the next.

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
