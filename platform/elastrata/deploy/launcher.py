"""Files for Ray's cluster launcher (`ray up`), and what their clusters can ever provide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray.autoscaler
from pydantic import BaseModel, NonNegativeInt

from elastrata.deploy.cluster_spec import ClusterSpec, NodeGroup
from elastrata_pipelines.errors import UserError, nearest

_DEFAULT_MAX_WORKERS = 2
"""The launcher's own default, where a file does not say."""
_FLAGS = {"CPU": "--num-cpus", "GPU": "--num-gpus"}


class _NodeType(BaseModel):
    resources: dict[str, NonNegativeInt]
    min_workers: NonNegativeInt = 0
    max_workers: NonNegativeInt | None = None


class _Provider(BaseModel):
    type: str
    worker_ips: list[str] = []


class LauncherFile(BaseModel):
    """The sizes in a file. Its other keys are for the launcher alone."""

    cluster_name: str
    provider: _Provider
    max_workers: NonNegativeInt | None = None
    head_node_type: str = ""
    available_node_types: dict[str, _NodeType] = {}
    head_start_ray_commands: list[str] = []
    worker_start_ray_commands: list[str] = []

    def cluster_spec(self, file: str) -> ClusterSpec:
        """The nodes that its cluster can ever have.

        Raises:
            UserError: the file does not say what its machines have.
        """
        if self.provider.type == "local":
            return self._own_machines(file)
        types = self.available_node_types
        if self.head_node_type not in types:
            known = ", ".join(types) or "available_node_types, which are missing"
            raise UserError(
                f"{file}: head_node_type: {self.head_node_type!r}: expected one of {known}"
            )
        most = _DEFAULT_MAX_WORKERS if self.max_workers is None else self.max_workers
        groups = {
            name: NodeGroup(
                name=name,
                resources=kind.resources,
                min_nodes=kind.min_workers,
                max_nodes=most if kind.max_workers is None else kind.max_workers,
            )
            for name, kind in types.items()
        }
        return ClusterSpec(
            file=file,
            head=groups.pop(self.head_node_type),
            groups=tuple(groups.values()),
            max_nodes=most,
        )

    def _own_machines(self, file: str) -> ClusterSpec:
        """Machines that are there already: their start commands say what Ray may use."""
        count = len(self.provider.worker_ips)
        commands = {
            "head_start_ray_commands": self.head_start_ray_commands,
            **({"worker_start_ray_commands": self.worker_start_ray_commands} if count else {}),
        }
        resources = {key: _resources_of(lines) for key, lines in commands.items()}
        problems = [
            f"{file}: {key}: no --num-cpus: what the machines have cannot be told from the file; "
            "add it"
            for key, found in resources.items()
            if "CPU" not in found
        ]
        if problems:
            raise UserError(*problems)
        head, *workers = (
            NodeGroup(name=key.split("_")[0], resources=found, min_nodes=count, max_nodes=count)
            for key, found in resources.items()
        )
        return ClusterSpec(file=file, head=head, groups=tuple(workers), max_nodes=count)


def unknown_keys(values: Mapping[str, Any], file: str) -> Iterator[str]:
    """A line for each key that the launcher would refuse, by the schema that Ray ships."""
    schema = json.loads(
        (Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8")
    )
    known = schema["properties"]
    (node_type,) = known["available_node_types"]["patternProperties"].values()
    sections = {"": (values, known)}
    types = values.get("available_node_types")
    for name, kind in (types if isinstance(types, dict) else {}).items():
        if isinstance(kind, dict):
            sections[f"available_node_types.{name}."] = kind, node_type["properties"]
    for prefix, (section, keys) in sections.items():
        for key in section:
            if key not in keys:
                yield f"{file}: {prefix}{key}: unknown key{nearest(key, keys)}"


def _resources_of(commands: Sequence[str]) -> dict[str, float]:
    """The CPUs and GPUs that a `ray start` among the commands is told of."""
    text = " ".join(commands)
    flags = {name: re.search(rf"{flag}[= ](\d+)", text) for name, flag in _FLAGS.items()}
    return {name: float(match.group(1)) for name, match in flags.items() if match}
