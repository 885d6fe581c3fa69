"""What a cluster file says: equal devices in equal nodes, or several kinds of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field, WithJsonSchema, field_validator

from elastrata.config import Config
from elastrata.core.device import Peak
from elastrata.planner.devices import NAMES, device_named
from elastrata.planner.hardware import Device
from elastrata.recipe.json_schema import DRAFT
from elastrata_pipelines.errors import UserError

MOST_DEVICES = 1_000_000
MOST_KINDS = 8
_GBIT = 1e9 / 8


def _in_any_case(names: Iterable[str]) -> str:
    """A pattern for these names, in upper or lower case: JSON Schema has no flag for it."""
    letters = [[f"[{c}{c.lower()}]" if c.isalpha() else c for c in name] for name in names]
    return f"^({'|'.join(''.join(name) for name in letters)})$"


_DEVICE_SCHEMA: dict[str, Any] = {
    "anyOf": [{"enum": list(NAMES)}, {"type": "string", "pattern": _in_any_case(NAMES)}]
}
DeviceName = Annotated[str, WithJsonSchema(_DEVICE_SCHEMA)]
Count = Annotated[int, Field(gt=0, le=MOST_DEVICES)]
Amount = Annotated[float, Field(gt=0, le=1e12)]


class _Named(Config):
    """A kind of device."""

    model_config = ConfigDict(strict=True)

    device: DeviceName
    """The kind of each, in upper or lower case."""

    @field_validator("device")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            return device_named(name).name
        except UserError as error:
            # the place and the value are told before it
            raise ValueError(error.problems[0].removeprefix(f"{name}: ")) from None


class _Number(_Named):
    """So many of a kind, in a cluster that has no other."""

    devices: Count
    """How many there are in all."""


class _Group(_Named):
    """So many of a kind, among others."""

    count: Count
    """How many there are of this kind."""


class _Described(Config):
    """What a file says of devices in the place of their data sheet, and what an hour costs."""

    per_node: Count | None = None
    """Devices in a node. Default: as machines with that device usually have."""
    network_gbit: Amount | None = None
    """Gbit/s of each device, each way, to other nodes. Default: as machines with that device
    usually have."""
    link_gb_per_second: Amount | None = None
    """GB/s of each device, each way, inside its node. Default: the data sheet's."""
    memory_gb: Amount | None = None
    """GB of each device. Default: what PyTorch sees of the data sheet's."""
    peak_tflops: Amount | None = None
    """TFLOP/s of dense matrix products of each device. Default: the data sheet's."""
    price: Amount | None = None
    """A device for an hour, in whatever currency. Default: no cost is computed."""
    spot_price: Amount | None = None
    """Likewise, where it may be taken away."""

    def described(self, name: str) -> Device:
        """The device of that name, with what the file says of it."""
        sheet = device_named(name)
        return replace(
            sheet,
            memory_bytes=_times(self.memory_gb, 1e9, sheet.memory_bytes),
            peak=Peak(_times(self.peak_tflops, 1e12, sheet.peak_flops), sheet.peak.dtype),
            link=_times(self.link_gb_per_second, 1e9, sheet.link),
            network=_times(self.network_gbit, _GBIT, sheet.network),
        )


class ClusterConfig(_Described, _Number):
    """Equal devices in equal nodes, and what an hour of them costs."""


class KindConfig(_Described, _Group):
    """One kind of device among several."""


class MixedConfig(Config):
    """Several kinds of devices, each in nodes of its own."""

    model_config = ConfigDict(strict=True)

    devices: Annotated[list[KindConfig], Field(min_length=1, max_length=MOST_KINDS)]
    """The kinds, where there are several."""


def _times(amount: float | None, unit: float, default: float) -> float:
    return default if amount is None else amount * unit


def cluster_schema() -> dict[str, Any]:
    """The schema of a cluster file as `elastrata plan` reads it."""
    equal, mixed = ClusterConfig.model_json_schema(), MixedConfig.model_json_schema()
    return {
        "$schema": DRAFT,
        "title": "Elastrata cluster",
        "$defs": mixed.pop("$defs"),
        "anyOf": [equal, mixed],
    }
