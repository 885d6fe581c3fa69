"""KubeRay's resources RayCluster and RayJob, and what their clusters can ever provide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from elastrata.deploy.cluster_spec import ClusterSpec, NodeGroup
from elastrata_pipelines.errors import UserError

_Text = Annotated[str, Field(coerce_numbers_to_str=True)]
_GPU = "gpu"
"""How the names of GPUs end, whoever makes them: `nvidia.com/gpu`."""
_MOST_OF_A_POD = 1_000_000


class _Resources(BaseModel):
    limits: dict[str, _Text] = {}
    requests: dict[str, _Text] = {}


class _Container(BaseModel):
    resources: _Resources = _Resources()


class _Pod(BaseModel):
    containers: Annotated[list[_Container], Field(min_length=1)]


class _Template(BaseModel):
    spec: _Pod


class _Group(BaseModel):
    rayStartParams: dict[str, _Text] = {}  # noqa: N815 - KubeRay's name
    template: _Template

    def resources(self, file: str) -> dict[str, float]:
        """Resources of one pod: what Ray is told, else the limits of its first container, else
        requests.

        Raises:
            UserError: one is no amount.
        """
        container = self.template.spec.containers[0].resources
        amounts = {**container.requests, **container.limits}
        gpus = [amount for name, amount in amounts.items() if name.endswith(_GPU)]
        claims = {
            "CPU": self.rayStartParams.get("num-cpus", amounts.get("cpu")),
            "GPU": self.rayStartParams.get("num-gpus", gpus[0] if gpus else None),
        }
        return {name: _rounded_up(text, name, file) for name, text in claims.items() if text}


class _WorkerGroup(_Group):
    groupName: str  # noqa: N815
    replicas: NonNegativeInt = 0
    minReplicas: NonNegativeInt = 0  # noqa: N815
    maxReplicas: NonNegativeInt = 2**31 - 1  # noqa: N815
    numOfHosts: PositiveInt = 1  # noqa: N815

    def node_group(self, file: str, *, autoscales: bool) -> NodeGroup:
        """Its pods; as many as there are to begin with where nothing changes their number."""
        low, high = self.minReplicas, self.maxReplicas
        return NodeGroup(
            name=self.groupName,
            resources=self.resources(file),
            min_nodes=self.numOfHosts * (low if autoscales else self.replicas),
            max_nodes=self.numOfHosts * (high if autoscales else self.replicas),
        )


class _ClusterSpec(BaseModel):
    enableInTreeAutoscaling: bool = False  # noqa: N815
    headGroupSpec: _Group  # noqa: N815
    workerGroupSpecs: list[_WorkerGroup] = []  # noqa: N815

    def cluster_spec(self, file: str) -> ClusterSpec:
        groups = tuple(
            group.node_group(file, autoscales=self.enableInTreeAutoscaling)
            for group in self.workerGroupSpecs
        )
        head = self.headGroupSpec.resources(file)
        return ClusterSpec(
            file=file,
            head=NodeGroup(name="head", resources=head, min_nodes=1, max_nodes=1),
            groups=groups,
            max_nodes=sum(group.max_nodes for group in groups),
        )


class RayCluster(BaseModel):
    """The sizes in a RayCluster."""

    kind: Literal["RayCluster"]
    spec: _ClusterSpec

    def cluster_spec(self, file: str) -> ClusterSpec:
        """The nodes that the cluster can ever have."""
        return self.spec.cluster_spec(file)


class _JobSpec(BaseModel):
    rayClusterSpec: _ClusterSpec  # noqa: N815


class RayJob(BaseModel):
    """The sizes of the cluster in a RayJob."""

    kind: Literal["RayJob"]
    spec: _JobSpec

    def cluster_spec(self, file: str) -> ClusterSpec:
        """The nodes that the cluster can ever have."""
        return self.spec.rayClusterSpec.cluster_spec(file)


KINDS: Mapping[str, type[RayCluster] | type[RayJob]] = {"RayCluster": RayCluster, "RayJob": RayJob}


def _rounded_up(quantity: str, name: str, file: str) -> float:
    """Ray's autoscaler counts whole CPUs and GPUs."""
    try:
        amount = int(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)
    except ValueError:
        raise UserError(
            f"{file}: {quantity}: expected a number of {name}s, such as 4, 0.5 or 500m"
        ) from None
    if not 0 <= amount <= _MOST_OF_A_POD:
        raise UserError(
            f"{file}: {quantity}: expected at least 0 and at most {_MOST_OF_A_POD:,} {name}s"
        )
    return float(math.ceil(amount))
