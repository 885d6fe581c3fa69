"""Facts about a run that a reader of its record will want: recipe, versions, machines, FLOPs."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from elastrata.run.folder import flatten
from elastrata.tracking.tracker import RUN_DIR
from elastrata_pipelines.format import Manifest

PACKAGES = ("elastrata", "ray", "torch", "transformers", "pyarrow", "mlflow")

_LIST = re.compile(r".*\bprepare\.sources")
_SOURCE = re.compile(r"(?P<list>.*\bprepare\.sources)\.(?P<number>\d+)\.(?P<key>.+)")
_GPU_MODEL = "accelerator_type:"
_NODE = re.compile(r"node:(?!__internal_head__).*")


def versions() -> dict[str, str]:
    """Version by package, Python included."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def git_commit() -> str | None:
    """The commit of the working directory's repository; None where it is not one."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def start_tags(
    data_fingerprint: str, run_dir: str, resources: Mapping[str, float]
) -> dict[str, str]:
    """The tags of a start of a run.

    Args:
        data_fingerprint: of what it trains on.
        run_dir: its folder or URL.
        resources: of the cluster, as Ray tells them.
    """
    commit = git_commit()
    # The names that MLflow's own pages show as source and version.
    source = {"mlflow.source.name": "elastrata", "mlflow.source.type": "LOCAL"}
    return {
        "data.fingerprint": data_fingerprint,
        RUN_DIR: run_dir,
        **source,
        **({"git.commit": commit, "mlflow.source.git.commit": commit} if commit else {}),
        **{f"hardware.{name}": value for name, value in hardware(resources).items()},
        **{f"version.{name}": value for name, value in versions().items()},
    }


def hardware(resources: Mapping[str, float]) -> dict[str, str]:
    """The hardware of a cluster, by name: `nodes`, `cpus`, `gpus`, `gpu_model`, `memory_gb`,
    `machine`.

    Args:
        resources: as Ray tells them.
    """
    models = [name.removeprefix(_GPU_MODEL) for name in resources if name.startswith(_GPU_MODEL)]
    return {
        "nodes": str(sum(bool(_NODE.fullmatch(name)) for name in resources)),
        "cpus": f"{resources.get('CPU', 0):g}",
        "gpus": f"{resources.get('GPU', 0):g}",
        **({"gpu_model": ", ".join(sorted(models))} if models and resources.get("GPU") else {}),
        "memory_gb": f"{resources.get('memory', 0) / 1e9:.0f}",
        "machine": platform.machine(),
    }


def recipe_params(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as parameters, by dotted path. Of the sources of its text there are the names alone:
    what else it says of them is in the recipe among the artifacts.

    Args:
        recipe: as nested dicts.
    """
    params: dict[str, Any] = {}
    for key, value in flatten(recipe).items():
        if source := _SOURCE.fullmatch(key):
            names = params.setdefault(source["list"], [])
            if source["key"] == "name":
                names.append(value or f"source-{source['number']}")
        else:
            params[key] = value
    return {key: ", ".join(v) if _LIST.fullmatch(key) else v for key, v in params.items()}


def data_params(manifests: Iterable[Manifest]) -> dict[str, Any]:
    """Return what data sets say of themselves as parameters, `data.manifest.KEY`; of several,
    `data.manifest.NUMBER.KEY`.

    Args:
        manifests: of the data sets, each once.
    """
    told = [
        {
            "fingerprint": manifest.fingerprint,
            "tokenizer": manifest.tokenizer_fingerprint,
            "vocabulary": manifest.vocabulary.size,
            "seq_len": manifest.seq_len,
            "packing": manifest.packing,
            "samples": manifest.samples,
            "tokens": manifest.tokens,
        }
        for manifest in manifests
    ]
    tree = told[0] if len(told) == 1 else told
    return flatten({"data": {"manifest": tree}})


@dataclass(frozen=True, kw_only=True)
class PhaseFlops:
    """Forward and backward of all steps of a phase, by the workload's formula."""

    last_step: int
    dense: int
    """With products with weights at zero."""
    needed: int
    """Without them."""

    def to_metrics(self) -> dict[str, float]:
        """The values to track, by metric name."""
        return {"flops/dense": self.dense, "flops/needed": self.needed}


def flops_by_phase(
    steps: Sequence[Mapping[str, Any]], last_steps: Sequence[int]
) -> list[PhaseFlops]:
    """The FLOPs of a run's phases that were begun: what it would have cost dense, what it needed.

    Args:
        steps: the steps of its history that count.
        last_steps: of its phases, in their order.
    """
    found, first = [], 1
    for last in last_steps:
        of_phase = [step for step in steps if first <= step["step"] <= last]
        if of_phase:
            dense = sum(step["flops"] for step in of_phase)
            zeros = sum(step.get("flops_of_zeros", 0) for step in of_phase)
            found.append(PhaseFlops(last_step=last, dense=dense, needed=dense - zeros))
        first = last + 1
    return found
