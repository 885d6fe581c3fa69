"""The keys of a cluster file: devices, and what is not as their data sheet says."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field, WithJsonSchema, field_validator

from elastrata.config import Config
from elastrata.core.device import Peak
from elastrata.planner.hardware import ALIASES, DEVICES, Device, device_named
from elastrata_pipelines.errors import UserError

MOST_DEVICES = 1_000_000
_GBIT = 1e9 / 8
_NAMES = [*DEVICES, *ALIASES]


def _in_any_case(names: list[str]) -> str:
    """A pattern for these names, in upper or lower case: JSON Schema has no flag for it."""
    letters = [[f"[{c}{c.lower()}]" if c.isalpha() else c for c in name] for name in names]
    return f"^({'|'.join(''.join(name) for name in letters)})$"


_DEVICE_SCHEMA: dict[str, Any] = {
    "anyOf": [{"enum": _NAMES}, {"type": "string", "pattern": _in_any_case(_NAMES)}]
}
DeviceName = Annotated[str, WithJsonSchema(_DEVICE_SCHEMA)]
Count = Annotated[int, Field(gt=0, le=MOST_DEVICES)]
Amount = Annotated[float, Field(gt=0, le=1e12)]


class ClusterConfig(Config):
    """Equal devices in equal nodes, and what an hour of them costs."""

    model_config = ConfigDict(strict=True)

    device: DeviceName
    """What each of them is, in upper or lower case."""
    devices: Count
    """How many there are in all."""
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
    """Of a device for an hour, in whatever currency. Default: no cost is computed."""
    spot_price: Amount | None = None
    """The same where it may be taken away."""

    @field_validator("device")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            return device_named(name).name
        except UserError as error:
            # the place and the value are told before it
            raise ValueError(error.problems[0].removeprefix(f"{name}: ")) from None

    def as_described(self) -> Device:
        """The device, with what the file says of it in the place of its data sheet."""
        sheet = device_named(self.device)
        return replace(
            sheet,
            memory_bytes=_times(self.memory_gb, 1e9, sheet.memory_bytes),
            peak=Peak(_times(self.peak_tflops, 1e12, sheet.peak_flops), sheet.peak.dtype),
            link=_times(self.link_gb_per_second, 1e9, sheet.link),
            network=_times(self.network_gbit, _GBIT, sheet.network),
        )


def _times(amount: float | None, unit: float, default: float) -> float:
    return default if amount is None else amount * unit
