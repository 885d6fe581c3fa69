"""A cluster: devices in nodes, and how fast groups of them talk."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from elastrata.planner.cluster_config import MOST_DEVICES, ClusterConfig
from elastrata.planner.hardware import Device, device_named
from elastrata.recipe.problems import recipe_problems
from elastrata.recipe.yaml_reader import RecipeText
from elastrata.recipe.yaml_values import parse_yaml, read_text
from elastrata_pipelines.errors import UserError

_SHORT = re.compile(r"(\d{1,12})\s*[xX*]\s*(\S+)")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in equal nodes."""

    device: Device
    devices: int
    per_node: int
    price: float | None = None
    """Of a device for an hour, in whatever currency."""
    spot_price: float | None = None
    """The same where it may be taken away."""

    def bus(self, size: int, stride: int) -> float:
        """Bytes per second, each way, at which every member of a group can send while all do.

        In a ring over nodes every member beside another of its node uses a network card of its
        own, so a group with many members in each node is as fast as all their cards.

        Args:
            size: members of the group.
            stride: devices from one member to the next.
        """
        if size * stride <= self.per_node:
            return self.device.link
        beside = max(1, self.per_node // stride)
        return min(self.device.link, beside * self.device.network)

    def is_inside_node(self, size: int, stride: int) -> bool:
        """Whether all members of a group are on one node."""
        return size * stride <= self.per_node


def read_cluster(text: str) -> Cluster:
    """A cluster from a short form such as `128xA100-80GB`, or from a YAML file.

    Raises:
        UserError: one line per mistake.
    """
    if short := _SHORT.fullmatch(text.strip()):
        return _cluster(int(short[1]), device_named_in(text, short[2]))
    if not os.path.lexists(text):
        raise UserError(
            f"--cluster: {text}: no such file; expected one, or a number of devices such as "
            "128xA100-80GB"
        )
    config = _read(text)
    cluster = _cluster(config.devices, config.as_described(), config.per_node)
    return replace(cluster, price=config.price, spot_price=config.spot_price)


def device_named_in(where: str, name: str) -> Device:
    """The same as `device_named`, with the place of a mistake.

    Raises:
        UserError: there is no such device.
    """
    try:
        return device_named(name)
    except UserError as error:
        raise UserError(f"{where}: device: {error.problems[0]}") from None


def _read(path: str) -> ClusterConfig:
    values = parse_yaml(read_text(Path(path), path), path)
    if not isinstance(values, dict):
        keys = ", ".join(ClusterConfig.model_fields)
        raise UserError(f"{path}: expected keys with values: {keys}")
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        text = RecipeText(file=path, name="", values=values)
        raise UserError(*recipe_problems(error, ClusterConfig, text)) from None


def _cluster(devices: int, device: Device, per_node: int | None = None) -> Cluster:
    if not 1 <= devices <= MOST_DEVICES:
        raise UserError(
            f"--cluster: {devices} devices: expected at least 1 and at most {MOST_DEVICES:,}"
        )
    return Cluster(
        device=device, devices=devices, per_node=min(devices, per_node or device.per_node)
    )
