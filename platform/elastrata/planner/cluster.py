"""Clusters of equal nodes with equal devices, and their description in a file or a short form."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, WithJsonSchema, field_validator

from elastrata.config import Config
from elastrata.device.capabilities import Peak
from elastrata.planner.devices import NAMES, Device, find_device
from elastrata.recipe.problems import recipe_problems
from elastrata.recipe.schema import DRAFT
from elastrata.recipe.yaml_reader import RecipeText
from elastrata.recipe.yaml_values import parse_yaml, read_text
from elastrata_pipelines.errors import UserError

MOST_DEVICES = 1_000_000
_GBIT = 1e9 / 8


def _in_any_case(names: Iterable[str]) -> str:
    """Return a regular expression that matches these names in upper or lower case."""
    # JSON Schema's patterns have no case-insensitive flag.
    letters = [[f"[{c}{c.lower()}]" if c.isalpha() else c for c in name] for name in names]
    return f"^({'|'.join(''.join(name) for name in letters)})$"


_DEVICE_SCHEMA: dict[str, Any] = {
    "anyOf": [{"enum": list(NAMES)}, {"type": "string", "pattern": _in_any_case(NAMES)}]
}
DeviceName = Annotated[str, WithJsonSchema(_DEVICE_SCHEMA)]
Count = Annotated[int, Field(gt=0, le=MOST_DEVICES)]
Amount = Annotated[float, Field(gt=0, le=1e12)]


class ClusterConfig(Config):
    """Identical devices in identical nodes, and their price per hour."""

    model_config = ConfigDict(strict=True)

    device: DeviceName
    """Name of the device, in upper or lower case."""
    devices: Count
    """Total number of devices."""
    per_node: Count | None = None
    """Devices per node. Default: the usual number for that device."""
    network_gbit: Amount | None = None
    """Network bandwidth per device and direction between nodes, in Gbit/s. Default: the usual value
    for that device."""
    link_gb_per_second: Amount | None = None
    """Bandwidth per device and direction inside a node, in GB/s. Default: from the data sheet."""
    memory_gb: Amount | None = None
    """Memory per device, in GB. Default: what PyTorch sees of the data sheet's."""
    peak_tflops: Amount | None = None
    """Peak TFLOP/s of dense matrix products per device. Default: from the data sheet."""
    price: Amount | None = None
    """Price of a device per hour, in any currency. Default: no cost is computed."""
    spot_price: Amount | None = None
    """Price of a preemptible device per hour, in the same currency."""

    @field_validator("device")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            return find_device(name).name
        except UserError as error:
            # `recipe_problems` prefixes the key and the value.
            raise ValueError(error.problems[0].removeprefix(f"{name}: ")) from None

    def described(self) -> Device:
        """Return the device, with the values of the file overriding those of its data sheet."""
        sheet = find_device(self.device)
        return replace(
            sheet,
            memory_bytes=_in_units(self.memory_gb, 1e9, sheet.memory_bytes),
            peak=Peak(_in_units(self.peak_tflops, 1e12, sheet.peak_flops), sheet.peak.dtype),
            link=_in_units(self.link_gb_per_second, 1e9, sheet.link),
            network=_in_units(self.network_gbit, _GBIT, sheet.network),
        )


def _in_units(amount: float | None, unit: float, default: float) -> float:
    return default if amount is None else amount * unit


def cluster_schema() -> dict[str, Any]:
    """Return the JSON Schema of a cluster file for `elastrata plan`."""
    return {"$schema": DRAFT, "title": "Elastrata cluster", **ClusterConfig.model_json_schema()}


_SHORT = re.compile(r"(\d{1,12})\s*[xX*]\s*([^\s+]+)")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes with equal devices."""

    device: Device
    devices: int
    per_node: int
    price: float | None = None
    """Price of one device per hour, in any currency."""
    spot_price: float | None = None
    """Price of one interruptible device per hour."""

    def bus(self, size: int, stride: int) -> float:
        """Return the bytes per second, each way, at which every member of a group can send
        simultaneously.

        Args:
            size: members of the group.
            stride: devices from one member to the next.
        """
        if size * stride <= self.per_node:
            return self.device.link
        # In a ring over nodes every member of a node uses a separate network card, so the group is
        # as fast as all cards of its members in a node.
        members_per_node = max(1, self.per_node // stride)
        return min(self.device.link, members_per_node * self.device.network)

    def is_inside_node(self, size: int, stride: int) -> bool:
        """Return whether all members of a group are on one node."""
        return size * stride <= self.per_node


def read_cluster(text: str) -> Cluster:
    """Return the cluster from a short form such as `128xA100-80GB`, or from a YAML file.

    Raises:
        UserError: one line for each mistake.
    """
    if found := _SHORT.fullmatch(text.strip()):
        return _cluster(int(found[1]), _find_device(text, found[2]))
    if not os.path.lexists(text):
        raise UserError(
            f"--cluster: {text}: no such file; expected one, or a number of devices such as "
            "128xA100-80GB"
        )
    return _read_file(text)


def _find_device(where: str, name: str) -> Device:
    try:
        return find_device(name)
    except UserError as error:
        raise UserError(f"{where}: device: {error.problems[0]}") from None


def _read_file(path: str) -> Cluster:
    values = parse_yaml(read_text(Path(path), path), path)
    if not isinstance(values, dict):
        keys = ", ".join(ClusterConfig.model_fields)
        raise UserError(f"{path}: expected keys with values: {keys}")
    if isinstance(values.get("devices"), list):
        raise UserError(
            f"{path}: devices: a list: expected the number of devices of one kind; plan each kind "
            "in a separate file"
        )
    try:
        config = ClusterConfig.model_validate(values)
    except ValidationError as error:
        text = RecipeText(file=path, name="", values=values)
        raise UserError(*recipe_problems(error, ClusterConfig, text)) from None
    cluster = _cluster(config.devices, config.described(), config.per_node)
    return replace(cluster, price=config.price, spot_price=config.spot_price)


def _cluster(devices: int, device: Device, per_node: int | None = None) -> Cluster:
    if not 1 <= devices <= MOST_DEVICES:
        raise UserError(
            f"--cluster: {devices} devices: expected at least 1 and at most {MOST_DEVICES:,}"
        )
    # A cluster that is smaller than a usual node is a single node.
    return Cluster(
        device=device, devices=devices, per_node=min(devices, per_node or device.per_node)
    )
