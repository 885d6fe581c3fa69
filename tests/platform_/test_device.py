"""What is known of a device by its name, and what a start asks of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.distributed_c10d import Backend, BackendConfig

from elastrata.device.capabilities import CudaFault, find_cuda_fault, peak_flops_of
from elastrata.parallel.mesh import backends
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.build_model import probe_capabilities
from elastrata.trainer.preflight import cuda_problems
from support.synthetic import tiny_recipe

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", None),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 990),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI300X", 1307.4),
        ("Tesla T4", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_is_that_of_the_device_of_this_very_name(
    name: str, teraflops: float | None
) -> None:
    """A slice of a device has no peak that anybody publishes; a T4's is not of bf16."""
    assert peak_flops_of(name) == (teraflops and teraflops * 1e12)


def test_groups_with_gpus_reduce_tensors_in_main_memory_too() -> None:
    config = BackendConfig(Backend(backends("cuda"))).get_device_backend_map()
    assert (config["cuda"], config["cpu"]) == ("nccl", "gloo")
    assert BackendConfig(Backend(backends("cpu"))).get_device_backend_map()["cpu"] == "gloo"


@pytest.mark.skipif(torch.version.cuda is not None, reason="a PyTorch with CUDA")
def test_a_torch_without_cuda_or_without_a_driver_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = find_cuda_fault()
    assert fault is not None
    assert fault.found == f"torch {torch.__version__} is built without CUDA"
    assert fault.advice.endswith(f"torch=={torch.__version__.partition('+')[0]}")
    # A build with CUDA, as far as its own words go: CUDA does not start all the same.
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    fault = find_cuda_fault()
    assert fault is not None
    assert "cannot use the driver: " in fault.found
    assert "CUDA 13.0" in fault.advice


def test_nodes_with_the_same_fault_are_one_line() -> None:
    without, old = CudaFault("no CUDA", "install it"), CudaFault("an old driver", "a newer one")
    assert cuda_problems(1.0, {}) == []
    assert cuda_problems(1.0, {"10.0.0.1": without, "10.0.0.2": old, "10.0.0.3": without}) == [
        "workers.gpus: 1: node 10.0.0.1 and 1 more: no CUDA; install it, or train on CPUs with "
        "workers.gpus=0",
        "workers.gpus: 1: node 10.0.0.2: an old driver; a newer one, or train on CPUs with "
        "workers.gpus=0",
    ]


def test_kernels_are_tried_only_where_the_recipe_wants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[torch.device] = []
    monkeypatch.setattr(
        "elastrata.device.capabilities.has_kernels", lambda device: not tried.append(device)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    values = {**tiny_recipe(tmp_path, tmp_path), "precision": "bf16"}
    masks, kernels = (
        Recipe.model_validate({**values, "sparsity": {"method": "two_four", "kernels": wanted}})
        for wanted in (False, True)
    )
    for recipe in (Recipe.model_validate(values), masks):
        assert not probe_capabilities(recipe, CUDA).skips_zeros
    assert tried == []
    assert probe_capabilities(kernels, CUDA).skips_zeros
    assert tried == [CUDA]
