"""Bytes on the device that needs most of them, term by term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastrata.core.model_spec import ModelSpec
from elastrata.planner.hardware import Device
from elastrata.planner.layout import Layout
from elastrata.planner.stack import FP32_BYTES, Stack
from elastrata.planner.stage import Stage, blocks_of_stages


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device."""

    parameters: float
    """Its share of the parameters and of what the optimizer keeps."""
    gathered: float
    """Whole parameters, as they are applied."""
    gradients: float
    """Gradients: added up over micro-batches, reduced, and on their way."""
    activations: float
    """Kept by blocks for the backward pass, of all micro-batches in flight."""
    working: float
    """The block that is computed, where its activations are computed again; logits and loss."""
    reserved: float
    """The driver, its kernels, the communication library."""
    fragmentation: float
    building: float
    """While the model is made, before its first step: this device's shard of the parameters, and
    the largest of them, whole, as it is drawn. Nothing of a step is there then."""

    @property
    def total(self) -> float:
        """The most at any time."""
        kept = self.parameters + self.gathered + self.gradients + self.activations
        return max(kept + self.working, self.building) + self.reserved + self.fragmentation


def memory(
    model: ModelSpec, device: Device, stack: Stack, layout: Layout, batch_size: int
) -> Memory:
    """Memory of a step at its peak: where a backward pass begins, with all activations, or where
    it ends, with all gradients.

    Args:
        model: that is trained.
        device: it is trained on.
        stack: the system that trains it.
        layout: how devices divide it.
        batch_size: samples of a step, over all devices.
    """
    blocks = blocks_of_stages(model, stack, layout)
    needs = [
        stage_memory(
            Stage(
                model=model,
                stack=stack,
                layout=layout,
                batch_size=batch_size,
                blocks=blocks[number],
                number=number,
            ),
            device,
        )
        for number in fullest(blocks)
    ]
    return max(needs, key=lambda need: need.total)


def fullest(blocks: Sequence[int]) -> set[int]:
    """Stages of which one needs most memory: the first, the last, and between them the first and
    the last with most blocks, where these are more than the first stage has.

    Args:
        blocks: of each stage.
    """
    last, most = len(blocks) - 1, max(blocks[:-1], default=0)
    if most <= blocks[0]:
        return {0, last}
    longest = [number for number in range(last) if blocks[number] == most]
    return {0, last, longest[0], longest[-1]}


def stage_memory(stage: Stage, device: Device) -> Memory:
    """Memory of a device with that part of the model, at its peak."""
    state, most = stage.state_bytes, stage.peak
    return Memory(
        parameters=state,
        gathered=most.gathered,
        gradients=most.gradients,
        activations=most.activations,
        working=most.working,
        reserved=device.reserved_bytes,
        fragmentation=stage.stack.fragmentation * (state + most.total),
        building=FP32_BYTES * (stage.own / stage.shards + _largest_parameter(stage.model)),
    )


def _largest_parameter(model: ModelSpec) -> int:
    """Numbers of the largest parameter: the table of tokens, or a feed-forward's matrix."""
    return model.hidden * max(model.vocabulary, model.feed_forward)
