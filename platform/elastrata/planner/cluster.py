"""A cluster: devices in nodes, how fast groups of them talk, and how one is read."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from elastrata.config import Config
from elastrata.planner.cluster_config import (
    MOST_DEVICES,
    MOST_KINDS,
    ClusterConfig,
    KindConfig,
    MixedConfig,
)
from elastrata.planner.devices import device_named
from elastrata.planner.hardware import Device
from elastrata.recipe.problems import recipe_problems
from elastrata.recipe.yaml_reader import RecipeText
from elastrata.recipe.yaml_values import parse_yaml, read_text
from elastrata_pipelines.errors import UserError

AnyConfig = TypeVar("AnyConfig", bound=Config)
_SHORT = re.compile(r"(\d{1,12})\s*[xX*]\s*([^\s+]+)")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in equal nodes."""

    device: Device
    devices: int
    per_node: int
    price: float | None = None
    """A device for an hour, in whatever currency."""
    spot_price: float | None = None
    """Likewise, where it may be taken away."""

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
    """A cluster of one kind of device, from a short form such as `128xA100-80GB`, or from a YAML
    file.

    Raises:
        UserError: one line per mistake; or there are several kinds.
    """
    kinds = read_kinds(text)
    if len(kinds) > 1:
        raise UserError(
            f"--cluster: {text}: {len(kinds)} kinds of devices: expected one here; `elastrata "
            "plan` takes several"
        )
    return kinds[0]


def read_kinds(text: str) -> tuple[Cluster, ...]:
    """The kinds of devices of a cluster, from a short form such as `8xA100-80GB+16xT4`, or from a
    YAML file: each is a cluster by itself, with nodes of its own.

    Raises:
        UserError: one line per mistake.
    """
    if all(short := [_SHORT.fullmatch(part.strip()) for part in text.split("+")]):
        kinds = [(int(found[1]), device_named_in(text, found[2])) for found in short if found]
        return _once_each(text, [_cluster(*kind) for kind in kinds])
    if not os.path.lexists(text):
        raise UserError(
            f"--cluster: {text}: no such file; expected one, or a number of devices such as "
            "128xA100-80GB"
        )
    return _read(text)


def device_named_in(where: str, name: str) -> Device:
    """Looks up a device, and says where a mistake is.

    Raises:
        UserError: there is no such device.
    """
    try:
        return device_named(name)
    except UserError as error:
        raise UserError(f"{where}: device: {error.problems[0]}") from None


def _read(path: str) -> tuple[Cluster, ...]:
    values = parse_yaml(read_text(Path(path), path), path)
    if not isinstance(values, dict):
        keys = ", ".join(ClusterConfig.model_fields)
        raise UserError(f"{path}: expected keys with values: {keys}")
    if isinstance(values.get("devices"), list):
        mixed = _checked(path, values, MixedConfig)
        return _once_each(path, [_of(kind, kind.count) for kind in mixed.devices])
    config = _checked(path, values, ClusterConfig)
    return (_of(config, config.devices),)


def _once_each(where: str, kinds: list[Cluster]) -> tuple[Cluster, ...]:
    """The kinds.

    Raises:
        UserError: one of them is there twice, or there are too many devices.
    """
    names = [kind.device.name for kind in kinds]
    problems = [
        f"{where}: devices: {name}: {names.count(name)} times: expected each kind once"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if (count := sum(kind.devices for kind in kinds)) > MOST_DEVICES:
        problems.append(f"{where}: {count} devices: expected at most {MOST_DEVICES:,}")
    if len(kinds) > MOST_KINDS:
        problems.append(f"{where}: {len(kinds)} kinds of devices: expected at most {MOST_KINDS}")
    if problems:
        raise UserError(*problems)
    return tuple(kinds)


def _checked(path: str, values: dict[str, Any], config: type[AnyConfig]) -> AnyConfig:
    try:
        return config.model_validate(values)
    except ValidationError as error:
        text = RecipeText(file=path, name="", values=values)
        raise UserError(*recipe_problems(error, config, text)) from None


def _of(config: ClusterConfig | KindConfig, count: int) -> Cluster:
    cluster = _cluster(count, config.described(config.device), config.per_node)
    return replace(cluster, price=config.price, spot_price=config.spot_price)


def _cluster(devices: int, device: Device, per_node: int | None = None) -> Cluster:
    if not 1 <= devices <= MOST_DEVICES:
        raise UserError(
            f"--cluster: {devices} devices: expected at least 1 and at most {MOST_DEVICES:,}"
        )
    return Cluster(
        device=device, devices=devices, per_node=min(devices, per_node or device.per_node)
    )
