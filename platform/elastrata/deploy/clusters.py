"""Cluster files, for Ray's cluster launcher (`ray up`) or for KubeRay.

A file is read into node groups, each with its largest size, and a recipe is checked against them.
All mistakes in a file are reported together.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import ray.autoscaler
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from elastrata.driver.doctor import Finding
from elastrata.driver.ray_session import NICENESS
from elastrata.recipe.problems import recipe_problems
from elastrata.recipe.recipe import WorkersConfig
from elastrata.recipe.yaml_reader import RecipeText
from elastrata.recipe.yaml_values import parse_documents, read_text
from elastrata.shipped import cluster_files
from elastrata_pipelines.errors import UserError, pluralize, suggest_nearest

_ROUNDING = 1e-6
"""Tolerance when dividing resources: three workers of 0.4 CPUs fit into 1.2."""
_READERS_CPUS = 1
"""CPUs for reading the data, in addition to those of the workers."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one kind."""

    name: str
    resources: Mapping[str, float]
    """Amounts on one node, by Ray's names: `CPU`, `GPU`."""
    min_nodes: int
    max_nodes: int

    def room(self, worker: Mapping[str, float]) -> int:
        """Return the number of workers that fit on one node.

        Args:
            worker: resources of one worker; at least one amount is above 0.
        """
        return min(
            int((self.resources.get(name, 0.0) + _ROUNDING) // amount)
            for name, amount in worker.items()
            if amount > 0
        )


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The nodes that the cluster of a file can have."""

    file: str
    """Name or path as the user gave it."""
    head: NodeGroup
    groups: tuple[NodeGroup, ...]
    """Node groups other than the head."""
    max_nodes: int
    """Most nodes of these groups together."""
    are_pods: bool = False
    """Whether nodes are pods, several of which may be on one machine."""

    def room(self, worker: Mapping[str, float]) -> int:
        """Return the most workers with these resources that the cluster can have simultaneously."""
        return int(self._most(lambda group: group.room(worker)))

    def max_amount(self, resource: str) -> float:
        """Return the most of a resource that the cluster can have simultaneously."""
        return self._most(lambda group: group.resources.get(resource, 0.0))

    def _most(self, on_a_node: Callable[[NodeGroup], float]) -> float:
        """Return the sum over the head, the minimum of every group, and the best choice of further
        nodes."""
        # Nodes that always run count first; the largest other ones fill the limit.
        total = on_a_node(self.head)
        total += sum(group.min_nodes * on_a_node(group) for group in self.groups)
        nodes_left = self.max_nodes - sum(group.min_nodes for group in self.groups)
        for group in sorted(self.groups, key=on_a_node, reverse=True):
            count = max(0, min(group.max_nodes - group.min_nodes, nodes_left))
            total += count * on_a_node(group)
            nodes_left -= count
        return total


# Files for Ray's cluster launcher

_DEFAULT_MAX_WORKERS = 2
"""The launcher's default if a file has no `max_workers`."""
_FLAGS = {"CPU": "--num-cpus", "GPU": "--num-gpus"}


class _NodeType(BaseModel):
    resources: dict[str, NonNegativeInt]
    min_workers: NonNegativeInt = 0
    max_workers: NonNegativeInt | None = None


class _Provider(BaseModel):
    type: str
    worker_ips: list[str] = []


# Other keys are only for the launcher; `find_unknown_keys` checks them.
class LauncherFile(BaseModel):
    """The sizes in a file for Ray's cluster launcher."""

    cluster_name: str
    provider: _Provider
    max_workers: NonNegativeInt | None = None
    head_node_type: str = ""
    available_node_types: dict[str, _NodeType] = {}
    head_start_ray_commands: list[str] = []
    worker_start_ray_commands: list[str] = []

    def cluster_spec(self, file: str) -> ClusterSpec:
        """Return the nodes that the cluster can have.

        Args:
            file: name of the file for errors.

        Raises:
            UserError: the head's type is unknown, or the resources of the machines are missing.
        """
        if self.provider.type == "local":
            return self._local_spec(file)
        types = self.available_node_types
        if self.head_node_type not in types:
            type_names = ", ".join(types) or "available_node_types, which are missing"
            raise UserError(
                f"{file}: head_node_type: {self.head_node_type!r}: expected one of {type_names}"
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
            # Evaluated before `groups`, which then lacks the head.
            head=groups.pop(self.head_node_type),
            groups=tuple(groups.values()),
            max_nodes=most,
        )

    def _local_spec(self, file: str) -> ClusterSpec:
        """Return the nodes of a `local` provider, with the resources in the start commands."""
        count = len(self.provider.worker_ips)
        # These machines exist already; only their start commands state their resources.
        commands = {
            "head_start_ray_commands": self.head_start_ray_commands,
            **({"worker_start_ray_commands": self.worker_start_ray_commands} if count else {}),
        }
        resources = {key: _parse_resources(lines) for key, lines in commands.items()}
        problems = [
            f"{file}: {key}: no --num-cpus: the file does not say how many CPUs the machines have; "
            "add it"
            for key, amounts in resources.items()
            if "CPU" not in amounts
        ]
        if problems:
            raise UserError(*problems)
        head, *workers = (
            NodeGroup(name=key.split("_")[0], resources=amounts, min_nodes=count, max_nodes=count)
            for key, amounts in resources.items()
        )
        return ClusterSpec(file=file, head=head, groups=tuple(workers), max_nodes=count)


def find_unknown_keys(values: Mapping[str, Any], file: str) -> Iterator[str]:
    """Yield a line for each key that the launcher would refuse, by the schema that Ray ships."""
    schema = json.loads(
        (Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8")
    )
    known_keys = schema["properties"]
    (node_type,) = known_keys["available_node_types"]["patternProperties"].values()
    sections = {"": (values, known_keys)}
    types = values.get("available_node_types")
    for name, kind in (types if isinstance(types, dict) else {}).items():
        if isinstance(kind, dict):
            sections[f"available_node_types.{name}."] = kind, node_type["properties"]
    for prefix, (section, keys) in sections.items():
        for key in section:
            if key not in keys:
                yield f"{file}: {prefix}{key}: unknown key{suggest_nearest(key, keys)}"


def _parse_resources(commands: Sequence[str]) -> dict[str, float]:
    """Return the CPUs and GPUs in the options of a `ray start` command."""
    text = " ".join(commands)
    flags = {name: re.search(rf"{flag}[= ](\d+)", text) for name, flag in _FLAGS.items()}
    return {name: float(match.group(1)) for name, match in flags.items() if match}


# KubeRay's resources

_Text = Annotated[str, Field(coerce_numbers_to_str=True)]
_GPU = "gpu"
"""End of the names of GPU resources of all vendors, such as `nvidia.com/gpu`."""
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
        """Return the resources of one pod: Ray's start parameters, else the limits of the first
        container, else its requests.

        Raises:
            UserError: a value is not an amount.
        """
        container = self.template.spec.containers[0].resources
        amounts = {**container.requests, **container.limits}
        gpus = [amount for name, amount in amounts.items() if name.endswith(_GPU)]
        claims = {
            "CPU": self.rayStartParams.get("num-cpus", amounts.get("cpu")),
            "GPU": self.rayStartParams.get("num-gpus", gpus[0] if gpus else None),
        }
        return {name: _round_up(text, name, file) for name, text in claims.items() if text}


class _WorkerGroup(_Group):
    groupName: str  # noqa: N815
    replicas: NonNegativeInt = 0
    minReplicas: NonNegativeInt = 0  # noqa: N815
    maxReplicas: NonNegativeInt = 2**31 - 1  # noqa: N815
    numOfHosts: PositiveInt = 1  # noqa: N815

    def node_group(self, file: str, *, autoscales: bool) -> NodeGroup:
        """Return the group's nodes; without an autoscaler their number is fixed at `replicas`."""
        low, high = self.minReplicas, self.maxReplicas
        return NodeGroup(
            name=self.groupName,
            resources=self.resources(file),
            min_nodes=self.numOfHosts * (low if autoscales else self.replicas),
            max_nodes=self.numOfHosts * (high if autoscales else self.replicas),
        )


class _KubeSpec(BaseModel):
    # Without the autoscaler KubeRay keeps `replicas` pods, whatever the bounds are.
    enableInTreeAutoscaling: bool = False  # noqa: N815
    headGroupSpec: _Group  # noqa: N815
    workerGroupSpecs: list[_WorkerGroup] = []  # noqa: N815

    def cluster_spec(self, file: str) -> ClusterSpec:
        """Return the nodes that the cluster can have."""
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
            are_pods=True,
        )


class RayCluster(BaseModel):
    """The sizes in a RayCluster."""

    kind: Literal["RayCluster"]
    spec: _KubeSpec

    def cluster_spec(self, file: str) -> ClusterSpec:
        """Return the nodes that the cluster can have."""
        return self.spec.cluster_spec(file)


class _JobSpec(BaseModel):
    rayClusterSpec: _KubeSpec  # noqa: N815


class RayJob(BaseModel):
    """The sizes of the cluster in a RayJob."""

    kind: Literal["RayJob"]
    spec: _JobSpec

    def cluster_spec(self, file: str) -> ClusterSpec:
        """Return the nodes that the cluster can have."""
        return self.spec.rayClusterSpec.cluster_spec(file)


KINDS: Mapping[str, type[RayCluster] | type[RayJob]] = {"RayCluster": RayCluster, "RayJob": RayJob}


def _round_up(quantity: str, name: str, file: str) -> float:
    """Return a Kubernetes quantity as a whole number, rounded up."""
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
    # Ray's autoscaler counts whole CPUs and GPUs.
    return float(math.ceil(amount))


# Reading a file

_Model = TypeVar("_Model", bound=BaseModel)


def read_cluster(name_or_path: str) -> ClusterSpec:
    """Read the nodes that the cluster of a file can have.

    Args:
        name_or_path: a file for Ray's cluster launcher or for KubeRay, or the name of one that
            ships with Elastrata, such as `aws`.

    Raises:
        UserError: one line per mistake, `<file>: <dotted.path>: <value>: <expectation>`.
    """
    documents = _parse_file(find_cluster_file(name_or_path), name_or_path)
    for values in documents:
        # A KubeRay file may have further documents, such as a quota.
        model = KINDS.get(str(values.get("kind")))
        if model is not None:
            return _validate(model, values, name_or_path).cluster_spec(name_or_path)
    if len(documents) == 1 and "provider" in documents[0]:
        unknown = list(find_unknown_keys(documents[0], name_or_path))
        return _validate(LauncherFile, documents[0], name_or_path, unknown).cluster_spec(
            name_or_path
        )
    raise UserError(
        f"{name_or_path}: expected a file for Ray's cluster launcher, with `provider`, or a "
        "RayCluster or RayJob of KubeRay"
    )


def find_cluster_file(name_or_path: str) -> Path:
    """Return the cluster file of a path, or of a name such as `aws`.

    Raises:
        UserError: the file does not exist.
    """
    if name_or_path.endswith((".yaml", ".yml")) or os.path.isfile(name_or_path):  # noqa: PTH113
        if not os.path.lexists(name_or_path):
            raise UserError(f"{name_or_path}: no such cluster file")
        return Path(name_or_path)
    files = {path.stem: path for path in cluster_files().glob("*.yaml")}
    if name_or_path not in files:
        raise UserError(
            f"{name_or_path}: no such cluster{suggest_nearest(name_or_path, files)}; expected a "
            f".yaml file or one of {', '.join(sorted(files))}"
        )
    return files[name_or_path]


def is_launcher_file(path: Path, shown: str) -> bool:
    """Return True if a cluster file is for Ray's cluster launcher.

    Args:
        path: the file.
        shown: its name in errors.

    Raises:
        UserError: the file is not YAML.
    """
    return any("provider" in values for values in _parse_file(path, shown))


def _parse_file(path: Path, shown: str) -> list[dict[str, Any]]:
    """Parse the mappings in a file as YAML 1.1, as Ray and Kubernetes do."""
    documents = parse_documents(read_text(path, shown), shown)
    return [values for values in documents if isinstance(values, dict)]


def _validate(
    model: type[_Model], values: Mapping[str, Any], file: str, unknown: list[str] | None = None
) -> _Model:
    """Validate the values that `model` knows; report all mistakes, after those of `unknown`."""
    problems = unknown or []
    try:
        checked = model.model_validate(values)
    except ValidationError as error:
        text = RecipeText(file=file, name="", values=dict(values))
        raise UserError(*problems, *recipe_problems(error, model, text)) from None
    if problems:
        raise UserError(*problems)
    return checked


# Whether a recipe fits


def check_cluster(cluster: ClusterSpec) -> Iterator[Finding]:
    """Yield the largest size of the cluster, and pods that split the GPUs of a machine."""
    resources = {name for group in (cluster.head, *cluster.groups) for name in group.resources}
    amounts = [
        f"{cluster.max_amount(name):g} {name}s" for name in ("CPU", "GPU") if name in resources
    ]
    yield Finding(
        name="cluster",
        status="ok",
        found=f"{cluster.file}: at most {pluralize(cluster.max_nodes, 'node')} besides the head, "
        f"{', '.join(amounts)}",
    )
    for group in cluster.groups if cluster.are_pods else ():
        if group.resources.get("GPU") == 1 and group.max_nodes > 1:
            yield Finding(
                name="pods",
                status="warning",
                found=f"{group.name}: one GPU each",
                advice="a pod for each machine, with all its GPUs: between pods NCCL uses neither "
                "peer-to-peer (NVLink) nor shared memory, even on one machine",
            )


def check_niceness(file: str, text: str) -> Iterator[Finding]:
    """Check that a cluster file sets the priority of workers, which they inherit from `ray start`.

    Args:
        file: name or path as the user gave it.
        text: content of the file.
    """
    is_named = NICENESS in text
    yield Finding(
        name="niceness",
        status="ok" if is_named else "warning",
        found=f"{file}: {NICENESS} is {'set' if is_named else 'not set'}",
        advice=""
        if is_named
        else f"{NICENESS}=0 in the environment of every `ray start`: at Ray's default, 15, any "
        "other work starves data loading, and training waits",
    )


def check_fit(workers: WorkersConfig, cluster: ClusterSpec) -> Iterator[Finding]:
    """Check that the workers of a recipe fit, and that CPUs are left for reading the data."""
    worker = worker_resources(workers, cluster)
    claim = " + ".join(f"{amount:g} {name}" for name, amount in worker.items())
    workers_per_node = {group.name: group.room(worker) for group in (cluster.head, *cluster.groups)}
    fitting = [f"{count} on a node of {name}" for name, count in workers_per_node.items() if count]
    yield Finding(
        name="worker",
        status="ok" if fitting else "problem",
        found=f"{claim}: {', '.join(fitting) or 'more than any node has'}",
        advice="" if fitting else "lower workers.cpus or workers.gpus, or add larger nodes",
    )
    room = cluster.room(worker)
    yield Finding(
        name="workers.min",
        status="ok" if workers.min <= room else "problem",
        found=f"{workers.min}, but at most {room} fit",
        advice="" if workers.min <= room else _advise("min", room),
    )
    most = room if workers.max == "auto" else workers.max
    yield Finding(
        name="workers.max",
        status="ok" if most <= room else "warning",
        found=f"{workers.max}, but at most {room} fit",
        advice="" if most <= room else _advise("max", room),
    )
    count = min(most, room)
    cpus_left = cluster.max_amount("CPU") - count * workers.cpus
    is_enough = cpus_left >= _READERS_CPUS
    yield Finding(
        name="reading",
        status="ok" if is_enough else "warning",
        found=f"{cpus_left:g} CPUs left besides {pluralize(count, 'worker')}",
        advice=""
        if is_enough
        else f"set workers.cpus below {workers.cpus:g}: data loading needs the rest",
    )


def worker_resources(workers: WorkersConfig, cluster: ClusterSpec) -> dict[str, float]:
    """Return the resources of each worker; under `auto` it gets a GPU if the cluster can have
    any."""
    gpus = workers.gpus_each(cluster.max_amount("GPU"))
    return {"CPU": workers.cpus, **({"GPU": gpus} if gpus else {})}


def _advise(bound: str, room: int) -> str:
    if not room:
        return "another cluster file"
    return f"workers.{bound}={room}, or a larger maximum in the file"
