"""A cluster: devices in nodes, and how fast groups of them talk."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastrata.planner.hardware import Device, device_named
from elastrata.recipe.yaml_values import parse_documents, read_text
from elastrata_pipelines.checked_json import printable
from elastrata_pipelines.errors import UserError, nearest

_SHORT = re.compile(r"(\d{1,12})\s*[xX*]\s*(\S+)")
_GBIT = 1e9 / 8
_MOST_DEVICES = 1_000_000
_LARGEST = 1e12
_SHOWN = 60
_KEYS = {
    "device": "a name such as A100-80GB",
    "devices": f"a whole number above 0 and at most {_MOST_DEVICES:,}",
    "per_node": f"a whole number above 0 and at most {_MOST_DEVICES:,}",
    "memory_gb": "a number above 0 and below a trillion",
    "peak_tflops": "a number above 0 and below a trillion",
    "link_gb_per_second": "a number above 0 and below a trillion",
    "network_gbit": "a number above 0 and below a trillion",
    "price": "a number above 0 and below a trillion",
    "spot_price": "a number above 0 and below a trillion",
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
    if not os.path.lexists(path):
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
    documents = parse_documents(read_text(path, str(path)), str(path))
    if len(documents) != 1 or not isinstance(documents[0], Mapping):
        raise UserError(f"{path}: expected keys with values: {', '.join(_KEYS)}")
    return documents[0]


def _from_values(values: Mapping[str, Any], where: str) -> Cluster:
    problems = [
        f"{where}: {_short(key)}: {_short(value)}: unknown key{nearest(str(key)[:_SHOWN], _KEYS)}"
        for key, value in values.items()
        if key not in _KEYS
    ]
    problems += [
        f"{where}: {key}: {_short(values[key])}: expected {_KEYS[key]}"
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


def _short(value: Any) -> str:
    return printable(str(value)[:_SHOWN])


def _is_valid(key: str, value: Any) -> bool:
    if key == "device":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if key in ("devices", "per_node"):
        return isinstance(value, int) and 0 < value <= _MOST_DEVICES
    return 0 < value <= _LARGEST


def _cluster(devices: int, device: Device, per_node: int | None = None) -> Cluster:
    if not 1 <= devices <= _MOST_DEVICES:
        raise UserError(
            f"--cluster: {devices} devices: expected at least 1 and at most {_MOST_DEVICES:,}"
        )
    return Cluster(
        device=device, devices=devices, per_node=min(devices, per_node or device.per_node)
    )
