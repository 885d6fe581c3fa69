"""Facts about a run for its tracking record: recipe, versions, hardware and FLOPs."""

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
# Ray reports a resource `node:ADDRESS` per node, and one more for the head.
_NODE = re.compile(r"node:(?!__internal_head__).*")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the main packages."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def git_commit() -> str | None:
    """Return the commit of the working directory's repository; None without a repository."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
        )
    # Git is not installed, or the folder is not in a repository.
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def start_tags(
    data_fingerprint: str, run_dir: str, resources: Mapping[str, float]
) -> dict[str, str]:
    """Return the tags for one start of a run.

    Args:
        data_fingerprint: fingerprint of the training data.
        run_dir: the run's folder or URL.
        resources: the cluster's resources, as reported by Ray.
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
    """Return a cluster's `nodes`, `cpus`, `gpus`, `gpu_model`, `memory_gb` and `machine`.

    Args:
        resources: the cluster's resources, as reported by Ray.
    """
    # Ray reports the GPU model as a resource `accelerator_type:MODEL`.
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
    """Return a recipe as parameters, by dotted path; text sources are listed by name only.

    Args:
        recipe: the recipe as nested dicts.
    """
    params: dict[str, Any] = {}
    for key, value in flatten(recipe).items():
        if source := _SOURCE.fullmatch(key):
            # MLflow limits a parameter to 6,000 characters; the artifacts hold the whole recipe.
            names = params.setdefault(source["list"], [])
            if source["key"] == "name":
                names.append(value or f"source-{source['number']}")
        else:
            params[key] = value
    return {key: ", ".join(v) if _LIST.fullmatch(key) else v for key, v in params.items()}


def data_params(manifests: Iterable[Manifest]) -> dict[str, Any]:
    """Return the manifests' main values as `data.manifest.KEY`.

    With several data sets, the keys are `data.manifest.NUMBER.KEY`.

    Args:
        manifests: the manifests of distinct data sets.
    """
    values = [
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
    tree = values[0] if len(values) == 1 else values
    return flatten({"data": {"manifest": tree}})


@dataclass(frozen=True, kw_only=True)
class PhaseFlops:
    """Forward and backward FLOPs of all steps of a phase, by the workload's formula."""

    last_step: int
    dense: int
    """Including products with weights at zero."""
    needed: int
    """Without products with weights at zero."""

    def to_metrics(self) -> dict[str, float]:
        """Return the values to track, by metric name."""
        return {"flops/dense": self.dense, "flops/needed": self.needed}


def flops_by_phase(
    steps: Sequence[Mapping[str, Any]], last_steps: Sequence[int]
) -> list[PhaseFlops]:
    """Return the FLOPs of each phase that was begun.

    Args:
        steps: the effective steps of the run's history.
        last_steps: the last step of each phase, in order.
    """
    found, first = [], 1
    for last in last_steps:
        of_phase = [step for step in steps if first <= step["step"] <= last]
        # Phases that have not begun have no FLOPs.
        if of_phase:
            dense = sum(step["flops"] for step in of_phase)
            zeros = sum(step.get("flops_of_zeros", 0) for step in of_phase)
            found.append(PhaseFlops(last_step=last, dense=dense, needed=dense - zeros))
        first = last + 1
    return found
