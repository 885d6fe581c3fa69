"""Seconds of kernels and messages: single ones, and those of a block and of the head."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

from elastrata.parallel.activation_checkpointing import Recomputation
from elastrata.planner.cluster import Cluster
from elastrata.planner.devices import Device, Efficiency
from elastrata.planner.stack import FP32_BYTES, Stack
from elastrata.workload.model_spec import ModelSpec

_TILE_FILL_LENGTH = 128
"""Length of the inner dimension that costs as much as filling and draining a tile's pipeline of
loads in cuBLAS, including the epilogue."""


@cache
def shape_efficiency(device: Device, rows: int, columns: int, inner: int, count: int = 1) -> float:
    """Return the rate of a matrix product relative to one that fills the device.

    A product is cut into tiles, and a multiprocessor computes one tile at a time. Tiles that
    overhang the edge and a partial last wave lose throughput.

    Args:
        device: device of the product.
        rows: rows of the result.
        columns: columns of the result.
        inner: length of the sums.
        count: number of products computed together.
    """
    best = 0.0
    for height, width, rate in device.tiles:
        tiles = count * math.ceil(rows / height) * math.ceil(columns / width)
        waves = math.ceil(tiles / device.multiprocessors)
        filled = count * rows * columns / (waves * device.multiprocessors * height * width)
        # cuBLAS chooses among its tiles, so the best known one counts.
        best = max(best, rate * filled)
    # A CPU core has no waves of tiles.
    if device.multiprocessors == 1:
        return 1.0
    return best * inner / (inner + _TILE_FILL_LENGTH)


@cache
def matmul_seconds(
    device: Device,
    efficiency: Efficiency,
    shape: tuple[int, int, int],
    element_bytes: int,
    count: int = 1,
) -> float:
    """Return the seconds of `count` products [rows, inner] x [inner, columns].

    The duration is the larger of the arithmetic and of the memory traffic (the roofline of Williams
    et al. 2009).

    Args:
        device: device of the products.
        efficiency: reached shares of the device's rates.
        shape: rows, columns, inner.
        element_bytes: bytes of each number.
        count: number of products computed together.
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
    """Return the seconds of element-wise kernels that read and write `num_bytes` bytes."""
    return num_bytes / (device.memory_bandwidth * efficiency.memory)


def gather_seconds(
    cluster: Cluster, efficiency: Efficiency, num_bytes: float, size: int, stride: int
) -> float:
    """Return the seconds of an all-gather or a reduce-scatter.

    Args:
        cluster: cluster with the links.
        efficiency: reached shares of the links' rates.
        num_bytes: bytes of the unsharded tensor.
        size: participating devices.
        stride: devices from one participant to the next.
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
    """Return the seconds of an all-reduce. The arguments are those of `gather_seconds`."""
    # A ring all-reduce is a reduce-scatter followed by an all-gather.
    return 2 * gather_seconds(cluster, efficiency, num_bytes, size, stride)


def neighbour_seconds(
    cluster: Cluster, efficiency: Efficiency, num_bytes: float, tensor: int, stride: int
) -> float:
    """Return the seconds of the message from one pipeline stage to the next.

    Each tensor-parallel device sends one part, and the receivers gather the whole (arXiv
    2104.04473, section 4.1).

    Args:
        cluster: cluster with the links.
        efficiency: reached shares of the links' rates.
        num_bytes: bytes of the micro-batch's hidden states.
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


_FLASH_BACKWARD = 2.5
"""Ratio of matrix products in flash attention's backward pass to those in its forward pass: five,
one of which recomputes the scores, to two (arXiv 2307.08691, section 3)."""


@dataclass(frozen=True)
class Passes:
    """Seconds of a forward and a backward pass."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Machine:
    """A device together with the training system that uses it."""

    device: Device
    efficiency: Efficiency
    stack: Stack

    @cached_property
    def messages(self) -> Efficiency:
        """Efficiency of messages, with the shares of the links that the system reaches."""
        link = self.efficiency.link * self.stack.link_factor
        network = self.efficiency.network * self.stack.network_factor
        return replace(self.efficiency, link=link, network=network)


@lru_cache(maxsize=4096)
def block_passes(
    model: ModelSpec, machine: Machine, samples: int, tensor: int, sequence: bool
) -> Passes:
    """Return the seconds of a block without its messages."""
    linear = _linear(model, machine, samples, tensor)
    attention = _attention(model, machine, samples, tensor)
    elementwise = _elementwise(model, machine, samples, tensor, sequence)
    parts = (linear, attention, elementwise)
    return Passes(sum(p.forward for p in parts), sum(p.backward for p in parts))


@lru_cache(maxsize=4096)
def recomputation_seconds(
    model: ModelSpec,
    machine: Machine,
    samples: int,
    tensor: int,
    sequence: bool,
    checkpointing: Recomputation,
) -> float:
    """Return the seconds of recomputation of one block."""
    if checkpointing == "none":
        return 0.0
    if checkpointing == "full":
        return block_passes(model, machine, samples, tensor, sequence).forward
    # `selective` keeps attention's result and every second matrix product. It recomputes key,
    # output and, in a gated feed-forward, the second product.
    recomputed = model.hidden * (model.kv_width + model.width)
    recomputed += model.hidden * model.feed_forward if model.gated else 0
    products = _linear(model, machine, samples, tensor).forward * recomputed / model.block_matrices
    return products + _elementwise(model, machine, samples, tensor, sequence).forward


@lru_cache(maxsize=4096)
def head_passes(model: ModelSpec, machine: Machine, samples: int, tensor: int) -> Passes:
    """Return the seconds of logits and loss."""
    tokens = max(1, round(samples * model.seq_len * model.predicted))
    columns = -(-model.vocabulary // tensor)
    product = _product(machine, tokens, columns, model.hidden)
    element = machine.stack.element_bytes
    logits = tokens * (model.vocabulary if machine.stack.whole_logits else columns)
    # Over both passes the loss accesses four fp32 numbers and two logits for each logit; each pass
    # counts half of that.
    loss = traffic_seconds(machine.device, machine.efficiency, logits * (2 * FP32_BYTES + element))
    return Passes(product.forward + loss, product.backward + loss)


def _product(machine: Machine, rows: int, columns: int, inner: int) -> Passes:
    """Return the seconds of a linear layer: one product forward, and two backward for the gradients
    of the input and the weight."""

    def seconds(*shape: int) -> float:
        a, b, c = shape
        return matmul_seconds(
            machine.device, machine.efficiency, (a, b, c), machine.stack.element_bytes
        )

    return Passes(
        seconds(rows, columns, inner), seconds(rows, inner, columns) + seconds(inner, columns, rows)
    )


def _linear(model: ModelSpec, machine: Machine, samples: int, tensor: int) -> Passes:
    """Return the seconds of a block's linear layers."""
    tokens = samples * model.seq_len
    wide = (2 if model.gated else 1) * model.feed_forward
    # Query, key and value are one product, and so are the two input matrices of a gated
    # feed-forward.
    products = [
        _product(machine, tokens, -(-(model.width + 2 * model.kv_width) // tensor), model.hidden),
        _product(machine, tokens, model.hidden, -(-model.width // tensor)),
        _product(machine, tokens, -(-wide // tensor), model.hidden),
        _product(machine, tokens, model.hidden, -(-model.feed_forward // tensor)),
    ]
    return Passes(sum(p.forward for p in products), sum(p.backward for p in products))


def _attention(model: ModelSpec, machine: Machine, samples: int, tensor: int) -> Passes:
    """Return the seconds of attention's scores and of their products with the values."""
    length, width = model.seq_len, model.head_width
    count = samples * -(-model.heads // tensor)
    if machine.stack.flash:
        flops = 4 * count * length * width * model.mean_context
        forward = flops / (machine.device.peak_flops * machine.efficiency.attention)
        return Passes(forward, _FLASH_BACKWARD * forward)

    def seconds(*shape: int) -> float:
        a, b, c = shape
        return matmul_seconds(
            machine.device, machine.efficiency, (a, b, c), machine.stack.element_bytes, count
        )

    scores, values = seconds(length, length, width), seconds(length, width, length)
    # Backward: for scores the gradients of query and key, for values those of both factors.
    return Passes(scores + values, 2 * values + scores + seconds(width, length, length))


def _elementwise(
    model: ModelSpec, machine: Machine, samples: int, tensor: int, sequence: bool
) -> Passes:
    """Return the seconds of element-wise reads and writes between matrix products, counted in bytes
    per token."""
    stack, h, e = machine.stack, model.hidden, machine.stack.element_bytes
    mask = 1 if stack.dropout else 0
    # Two norms (read, write), two residual additions (read twice, write; the mask of dropout).
    shared = 2 * 2 * e * h + 2 * (3 * e + mask) * h
    # Norms read the gradient as well; gradients of the two branches are added up.
    shared_backward = 2 * 3 * e * h + 2 * 3 * e * h + 2 * mask * (2 * e + 1) * h
    own, own_backward = _own_traffic(model, stack)
    # Every tensor-parallel device computes norms and residuals for all tokens unless tokens are
    # divided.
    parts = tensor if sequence else 1
    tokens = samples * model.seq_len

    def seconds(num_bytes: float) -> float:
        return traffic_seconds(machine.device, machine.efficiency, tokens * num_bytes)

    return Passes(
        seconds(shared / parts + own / tensor),
        seconds(shared_backward / parts + own_backward / tensor),
    )


def _own_traffic(model: ModelSpec, stack: Stack) -> tuple[float, float]:
    """Return the bytes per token, forward and backward, that tensor-parallel devices divide."""
    e, f = stack.element_bytes, model.feed_forward
    if model.gated:
        numbers, backward = (3, 5) if stack.fused else (5, 8)
    else:
        numbers, backward = 2, 3
    own, own_backward = numbers * e * f, backward * e * f
    if model.position_rows == 0:
        turned = 2 * e * (model.width + model.kv_width)
        own, own_backward = own + turned, own_backward + turned
    if model.qk_norm:  # forward one read and one write; backward one more read for the gradient
        normed = e * (model.width + model.kv_width)
        own, own_backward = own + 2 * normed, own_backward + 3 * normed
    if not stack.flash:
        scores = model.heads * model.seq_len
        dropped = 2 * e + 1 if stack.dropout else 0
        own += scores * (2 * e + dropped)
        own_backward += scores * (3 * e + dropped)
    return own, own_backward
