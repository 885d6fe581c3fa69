"""What is known of a device by its name, and what a start asks of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.distributed_c10d import Backend, BackendConfig

from elastrata.device.capabilities import (
    CudaFault,
    GpuSupport,
    find_cuda_fault,
    peak_flops_of,
    probe_gpus,
)
from elastrata.driver.launch import settle_for_cluster
from elastrata.parallel.mesh import backends
from elastrata.planner.cluster import read_cluster
from elastrata.planner.plan import build_machine
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.yaml_reader import available_recipes
from elastrata.rehearsal.process import Request
from elastrata.rehearsal.rehearse import read_task
from elastrata.run.folder import RunIdentity, check_same_run, write_identity
from elastrata.trainer.build_model import probe_capabilities
from elastrata.trainer.preflight import cuda_problems
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
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
    well = GpuSupport(None, has_bf16=True, can_compile=True)
    faults = {"10.0.0.1": without, "10.0.0.2": old, "10.0.0.3": without}
    support = {node: GpuSupport(fault) for node, fault in faults.items()} | {"10.0.0.4": well}
    assert cuda_problems(1.0, support) == [
        "workers.gpus: 1: node 10.0.0.1 and 1 more: no CUDA; install it, or train on CPUs with "
        "workers.gpus=0",
        "workers.gpus: 1: node 10.0.0.2: an old driver; a newer one, or train on CPUs with "
        "workers.gpus=0",
    ]


@pytest.mark.skipif(torch.version.cuda is not None, reason="a PyTorch with CUDA")
def test_a_probe_of_gpus_stops_at_the_fault() -> None:
    assert probe_gpus() == GpuSupport(find_cuda_fault())


AUTO = {"precision": "auto", "compile": "auto"}
AMPERE = GpuSupport(None, has_bf16=True, can_compile=True)
VOLTA = GpuSupport(None, has_bf16=False, can_compile=True)
BARE = GpuSupport(None, has_bf16=True, can_compile=False)


@pytest.mark.parametrize(
    ("gpus", "support", "precision", "compile"),
    [
        (0.0, [], "fp32", False),
        (1.0, [AMPERE, AMPERE], "bf16", True),
        (1.0, [AMPERE, VOLTA], "fp32", True),
        (1.0, [BARE, AMPERE], "bf16", False),
        (1.0, [], "bf16", True),
    ],
)
def test_auto_is_what_all_nodes_have_and_one_line_says_so(
    gpus: float, support: list[GpuSupport], precision: str, compile: bool, tmp_path: Path
) -> None:
    recipe = Recipe.model_validate(tiny_recipe(tmp_path, tmp_path, **AUTO))
    nodes = {str(number): one for number, one in enumerate(support)}
    found, line = settle_for_cluster(recipe, gpus, nodes, None)
    assert (found.precision, found.compile) == (precision, compile)
    where = "GPUs" if gpus else "CPUs"
    assert line == f"auto on {where}: precision {precision}, compile {str(compile).lower()}"
    plain = Recipe.model_validate(tiny_recipe(tmp_path, tmp_path))
    assert settle_for_cluster(plain, gpus, nodes, None) == (plain, "")


def test_a_run_keeps_the_precision_it_began_with_on_another_kind_of_device(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(tiny_recipe(tmp_path, tmp_path, **AUTO))
    on_gpus, _ = settle_for_cluster(recipe, 1.0, {"a": AMPERE}, None)
    found, line = settle_for_cluster(recipe, 0.0, {}, on_gpus)
    assert (found.precision, found.compile) == ("bf16", False)
    assert line == (
        "auto on CPUs: precision bf16, as the run began (fp32 for a new run), compile false"
    )
    run = Storage(str(tmp_path / "run"))
    identity = RunIdentity(name="run", data=())
    write_identity(run, identity, on_gpus)
    check_same_run(run, identity, recipe, ())
    other = recipe.model_copy(update={"precision": "fp32"})
    with pytest.raises(UserError, match="precision: 'bf16' in the run of this name, 'fp32'"):
        check_same_run(run, identity, other, ())


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": {"min": 1, "max": 1, "speeds": "measured"}},
        {"parallel": {"pipeline": 2, "schedule": "zero_bubble", "reshard_after_forward": False}},
    ],
)
def test_auto_does_not_compile_what_cannot_be_compiled(changes: object, tmp_path: Path) -> None:
    recipe = Recipe.model_validate({**tiny_recipe(tmp_path, tmp_path, **AUTO), **changes})  # type: ignore[dict-item]
    assert recipe.on_device(is_gpu=True, has_bf16=True).compile is False


@pytest.mark.parametrize(("device", "precision"), [("8xA100-80GB", "bf16"), ("2xV100", "fp32")])
def test_a_rehearsal_and_a_plan_settle_auto_for_the_device_they_name(
    device: str, precision: str
) -> None:
    recipe, cluster = "gpt/tiny", read_cluster(device)
    rehearsed = read_task(Request(recipe=recipe, overrides=("workers.max=1",), cluster=device))
    assert (rehearsed.recipe.precision, rehearsed.recipe.compile) == (precision, True)
    planned = build_machine(load_recipe(recipe), cluster).stack
    told = build_machine(load_recipe(recipe, [f"precision={precision}"]), cluster).stack
    assert planned == told


def test_the_first_recipes_leave_precision_and_compilation_to_the_device() -> None:
    quick = {name for name in available_recipes() if "quick" in name}
    assert len(quick) > 2
    for name in {"bert/tiny", "bert/mini", "gpt/tiny", "modernbert/mini", *quick}:
        recipe = load_recipe(name)
        assert (recipe.precision, recipe.compile) == ("auto", "auto"), name


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
