"""A cluster: devices in nodes, and how fast groups of them talk."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from elastrata.planner.hardware import Device, device_named
from elastrata_pipelines.errors import UserError, nearest

_SHORT = re.compile(r"(\d+)\s*[xX*]\s*(\S+)")
_GBIT = 1e9 / 8
_KEYS = {
    "device": "a name such as A100-80GB",
    "devices": "a whole number above 0",
    "per_node": "a whole number above 0",
    "memory_gb": "a number above 0",
    "peak_tflops": "a number above 0",
    "link_gb_per_second": "a number above 0",
    "network_gbit": "a number above 0",
    "price": "a number above 0",
    "spot_price": "a number above 0",
}


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
    path = Path(text)
    if not path.is_file():
        raise UserError(
            f"--cluster: {text}: no such file; expected one, or a number of devices such as "
            "128xA100-80GB"
        )
    return _from_values(_read(path), text)


def device_named_in(where: str, name: str) -> Device:
    """The same as `device_named`, with the place of a mistake.

    Raises:
        UserError: there is no such device.
    """
    try:
        return device_named(name)
    except UserError as error:
        raise UserError(f"{where}: device: {error.problems[0]}") from None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: expected keys with values: {', '.join(_KEYS)}")
    return values


def _from_values(values: Mapping[str, Any], where: str) -> Cluster:
    problems = [
        f"{where}: {key}: {value}: unknown key{nearest(str(key), _KEYS)}"
        for key, value in values.items()
        if key not in _KEYS
    ]
    problems += [
        f"{where}: {key}: {values[key]}: expected {_KEYS[key]}"
        for key in _KEYS
        if key in values and not _is_valid(key, values[key])
    ]
    problems += [
        f"{where}: {key}: missing: expected {_KEYS[key]}"
        for key in ("device", "devices")
        if key not in values
    ]
    if problems:
        raise UserError(*problems)
    device = device_named_in(where, values["device"])
    changes = {
        field: values[key] * unit
        for key, field, unit in (
            ("memory_gb", "memory_bytes", 1e9),
            ("peak_tflops", "peak_flops", 1e12),
            ("link_gb_per_second", "link", 1e9),
            ("network_gbit", "network", _GBIT),
        )
        if key in values
    }
    found = _cluster(values["devices"], replace(device, **changes), values.get("per_node"))
    return replace(found, price=values.get("price"), spot_price=values.get("spot_price"))


def _is_valid(key: str, value: Any) -> bool:
    if key == "device":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value > 0 and (isinstance(value, int) or key not in ("devices", "per_node"))


def _cluster(devices: int, device: Device, per_node: int | None = None) -> Cluster:
    if devices < 1:
        raise UserError("--cluster: 0 devices: expected at least 1")
    return Cluster(
        device=device, devices=devices, per_node=min(devices, per_node or device.per_node)
    )
