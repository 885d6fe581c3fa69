"""The cluster files: Ray and Kubernetes accept them, and they keep what they promise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from elastrata.deploy.clusters import check_cluster, read_cluster
from elastrata.driver.prometheus import BY_SET, BY_SOURCE, BY_USE, COUNTERS, GAUGES
from elastrata.driver.ray_session import NICENESS
from elastrata.shipped import cluster_files
from support.crd import crd_problems

CLOUDS = ("aws", "gcp", "azure")
LAUNCHED = (*CLOUDS, "one-machine", "raylets")
GIB = 2**30


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((cluster_files() / f"{name}.yaml").read_text(encoding="utf-8")))


def _launched(name: str) -> dict[str, Any]:
    (values,) = _documents(name)
    return values


def _kuberay(name: str) -> dict[str, Any]:
    return _documents(name)[0]


def _start_commands(values: dict[str, Any]) -> str:
    return " ".join(values["head_start_ray_commands"] + values["worker_start_ray_commands"])


def test_every_file_is_tested() -> None:
    names = {path.stem for path in cluster_files().glob("*.yaml")}
    assert names == {*LAUNCHED, "kuberay-cluster", "kuberay-job"}


@pytest.mark.parametrize("name", LAUNCHED)
def test_rays_own_loader_and_schema_accept_it(name: str) -> None:
    prepared = prepare_config(_launched(name))
    validate_config(prepared)
    assert prepared["head_node_type"] in prepared["available_node_types"]


@pytest.mark.parametrize("name", [*LAUNCHED, "kuberay-cluster", "kuberay-job"])
def test_workers_run_at_the_priority_of_other_programs(name: str) -> None:
    """In every place where a raylet is started."""
    text = (cluster_files() / f"{name}.yaml").read_text(encoding="utf-8")
    count = text.count(NICENESS if name in LAUNCHED else f'{NICENESS}, value: "0"')
    assert count == {"one-machine": 3, "kuberay-cluster": 3, "kuberay-job": 3}.get(name, 1)


@pytest.mark.parametrize("name", ["kuberay-cluster", "kuberay-job"])
def test_kuberay_accepts_it(name: str) -> None:
    assert crd_problems(_kuberay(name)) == []


@pytest.mark.parametrize("name", CLOUDS)
def test_the_head_is_on_demand_and_the_workers_are_spot(name: str) -> None:
    values = _launched(name)
    types = values["available_node_types"]
    spot = {kind for kind, found in types.items() if re.search("(?i)spot", str(found))}
    assert spot == types.keys() - {values["head_node_type"]}
    assert len(spot) > 2
    assert types[values["head_node_type"]]["resources"] == {"CPU": 0}


@pytest.mark.parametrize("name", CLOUDS)
def test_a_cloud_node_has_a_guard_a_token_descriptors_and_an_idle_time(name: str) -> None:
    values = _launched(name)
    (guard,) = (line for line in values["worker_start_ray_commands"] if "guard" in line)
    assert f"elastrata guard --cloud {name}" in guard
    assert "-e RAY_AUTH_MODE=token" in values["docker"]["run_options"]
    assert "~/.ray/auth_token" in values["file_mounts"]
    assert "ulimit -n 65536" in values["head_start_ray_commands"][-1]
    assert "ulimit -n 65536" in values["worker_start_ray_commands"][-1]
    assert f"--object-store-memory={16 * GIB}" in values["worker_start_ray_commands"][-1]
    assert "--dashboard-host=127.0.0.1" in _start_commands(values)
    assert 0 < values["idle_timeout_minutes"] <= 60


def test_the_clouds_differ_in_what_is_the_clouds_own_alone() -> None:
    """No overlays: `ray up` reads these files as they are. This keeps the copies equal."""
    own = {"provider", "available_node_types", "auth", "file_mounts", "head_setup_commands"}
    aws, gcp, azure = ({k: v for k, v in _launched(c).items() if k not in own} for c in CLOUDS)
    for cloud, values in (("gcp", gcp), ("azure", azure)):
        guard = values["worker_start_ray_commands"].pop(1)
        assert (
            guard.replace(f"--cloud {cloud}", "--cloud aws")
            == (aws["worker_start_ray_commands"][1])
        )
    aws["worker_start_ray_commands"].pop(1)
    assert aws == gcp == azure


@pytest.mark.parametrize("name", [*LAUNCHED, "kuberay-cluster", "kuberay-job"])
def test_no_file_holds_a_key_and_every_image_is_pinned(name: str) -> None:
    text = (cluster_files() / f"{name}.yaml").read_text(encoding="utf-8")
    assert not re.search(r"(?i)(secret_?key|password|access_key|BEGIN .*KEY|AKIA)", text)
    images = re.findall(r"image: (\S+)", text)
    assert all(re.search(r":\d+\.\d+\.\d+-(cpu|gpu)$", image) for image in images)


@pytest.mark.parametrize("name", ["kuberay-cluster", "kuberay-job"])
def test_pods_are_whole_machines_with_shared_memory(name: str) -> None:
    spec = _kuberay(name)["spec"]
    for group in spec.get("rayClusterSpec", spec)["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        (mount,) = container["volumeMounts"]
        (volume,) = (one for one in pod["volumes"] if one["name"] == mount["name"])
        assert mount["mountPath"] == "/dev/shm"
        assert volume["emptyDir"]["medium"] == "Memory"
        size = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) * GIB
        assert size > int(group["rayStartParams"]["object-store-memory"])
        assert container["resources"]["limits"] == container["resources"]["requests"]
    assert [finding.name for finding in check_cluster(read_cluster(name))] == ["cluster"]


def test_pods_of_one_gpu_each_are_advised_against(tmp_path: Path) -> None:
    text = (cluster_files() / "kuberay-cluster.yaml").read_text(encoding="utf-8")
    file = tmp_path / "cluster.yaml"
    file.write_text(text.replace('gpu: "8"', 'gpu: "1"'), encoding="utf-8")
    _, finding = check_cluster(read_cluster(str(file)))
    assert (finding.status, finding.found) == ("warning", "gpu: one GPU each")
    assert finding.advice.startswith("a pod for each machine, with all its GPUs")


def test_pods_have_the_time_to_save_and_the_head_is_not_evicted() -> None:
    cluster, *budgets = _documents("kuberay-cluster")
    for group in cluster["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:3] == ["elastrata", "guard", "--now"]
        assert 30 <= int(command[3]) < pod["terminationGracePeriodSeconds"]
    allowed = {
        budget["spec"]["selector"]["matchLabels"]["ray.io/node-type"]: budget["spec"]
        for budget in budgets
    }
    assert allowed["head"]["maxUnavailable"] == 0
    assert allowed["worker"]["maxUnavailable"] == 1


def test_the_images_are_pinned_and_install_what_is_tested() -> None:
    text = (cluster_files() / "Dockerfile").read_text(encoding="utf-8")
    bases = re.findall(r"^FROM (\S+:\S+) AS", text, flags=re.MULTILINE)
    assert bases
    assert all(re.search(r":\d+\.\d+\.\d+-", base) for base in bases)
    installs = [line for line in text.splitlines() if "pip install" in line]
    assert installs
    assert all("-c constraints.txt" in line for line in installs)
    # Without a C compiler, `compile` would be off in the image for GPUs.
    _, _, gpu = text.partition(" AS torch-gpu")
    assert re.search(r"install .*\bgcc libc6-dev\b", gpu)
    assert {"cpu", "gpu"} <= set(re.findall(r"^FROM \S+ AS (\S+)", text, flags=re.MULTILINE))


def test_what_the_shipped_files_can_provide() -> None:
    amounts = {
        name: (read_cluster(name).max_nodes, *map(read_cluster(name).max_amount, ("CPU", "GPU")))
        for name in (*LAUNCHED, "kuberay-cluster", "kuberay-job")
    }
    assert amounts == {
        "aws": (16, 768, 64),
        "gcp": (16, 768, 64),
        "azure": (16, 672, 24),
        "one-machine": (0, 16, 1),
        "raylets": (3, 6, 0),
        "kuberay-cluster": (8, 416, 32),
        "kuberay-job": (8, 416, 32),
    }


def test_the_dashboard_shows_what_there_is() -> None:
    dashboard = json.loads((cluster_files() / "grafana.json").read_text(encoding="utf-8"))
    shown = {
        re.match(r"\w+", target["expr"])[0]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    counted = {f"{name}_total" for name in COUNTERS}
    assert shown == {f"ray_{name}" for name in (*GAUGES, *BY_SOURCE, *BY_SET, *BY_USE, *counted)}
