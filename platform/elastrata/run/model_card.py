"""The card of an exported model: a README with the front matter that the Hugging Face Hub reads.

It describes the model and its provenance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastrata.recipe.yaml_values import dump_yaml
from elastrata.run.folder import MAY_CHANGE, Parent
from elastrata.workload.workload import TransformersNames
from elastrata_pipelines.errors import pluralize
from elastrata_pipelines.format import Manifest

CARD = "README.md"
_LEFT_OUT = (*MAY_CHANGE, "begin_with")
"""Keys of locations. The initial weights are identified by their checksum instead."""
_PHASE = re.compile(r"^phases\.\d+\.")


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The content of a model card."""

    name: str
    """The run's name."""
    version: str
    """The version of Elastrata."""
    exported_as: TransformersNames
    dtype: str
    """The dtype of the weights: `float32`."""
    weights: str = "trained"
    """Which weights of the checkpoint: `trained`, `average`, `mean:5`..."""
    parameters: int | None
    """Number of values in the weight files; None if not counted."""
    steps: int
    samples: int
    tokens: int
    metrics: Mapping[str, float]
    """Metrics of the evaluation after the last step; empty without one."""
    checkpoint: str
    """The commit's name."""
    checkpoint_sha256: str
    """SHA-256 of the commit's marker, which holds the checksums of its files."""
    mlflow_run_id: str | None
    digest: str | None
    """The digest of `elastrata audit`; None if the history could not be read."""
    parent: Parent | None
    """The initial weights; None: initialised at random."""
    data: Sequence[Manifest]
    """The manifests of the data sets of all phases."""
    recipe: Mapping[str, Any]
    """All values of the recipe."""

    def to_markdown(self) -> str:
        """Return the README."""
        front = dump_yaml(self._front_matter())
        sections = [
            f"# {self.name}",
            self._introduction(),
            self._usage(),
            "## Data",
            _table(("samples", "tokens", "longest", "fingerprint"), self._data_rows()),
            *(["## Metrics", self._metrics()] if self.metrics else []),
            "## Where it comes from",
            _table(("", ""), self._provenance()),
            "## Recipe",
            "Without the keys that say where and how the same samples are computed on.",
            f"```yaml\n{dump_yaml(learning_values(self.recipe))}```",
        ]
        return f"---\n{front}---\n\n" + "\n\n".join(sections) + "\n"

    def _front_matter(self) -> dict[str, Any]:
        task = self.exported_as.task
        front: dict[str, Any] = {
            "library_name": "transformers",
            "pipeline_tag": task,
            "tags": ["elastrata", self.recipe["workload"]["name"]],
        }
        if not self.metrics:
            return front
        # The hub requires a data set for each metric. Evaluations are on data held out of the last
        # phase's data set.
        data = {"type": "elastrata", "name": f"held out of {self.data[-1].fingerprint[:12]}"}
        metrics = [
            {"type": name.removeprefix("eval/"), "name": name, "value": value}
            for name, value in self.metrics.items()
        ]
        results = [{"task": {"type": task}, "dataset": data, "metrics": metrics}]
        return {**front, "model-index": [{"name": self.name, "results": results}]}

    def _introduction(self) -> str:
        size = "" if self.parameters is None else f" of {pluralize(self.parameters, 'parameter')}"
        begun_text = (
            "" if self.parent is None else f", begun with other weights, `{self._parent()}`"
        )
        return (
            f"A `{self.recipe['workload']['name']}`{size}, pre-trained with Elastrata "
            f"{self.version}: {pluralize(self.steps, 'step')}, "
            f"{pluralize(self.samples, 'sample')}, {pluralize(self.tokens, 'token')}"
            f"{begun_text}. Its weights are in {self.dtype}."
        )

    def _parent(self) -> str:
        """Return the parent's name without its location."""
        if self.parent is None:
            return ""
        step = "" if self.parent.step is None else f", step {self.parent.step:,}"
        # The path would reveal folders of the machine, and means nothing elsewhere.
        return self.parent.url.rstrip("/").rpartition("/")[2] + step

    def _usage(self) -> str:
        loader = self.exported_as.loader
        lines = [
            f"from transformers import AutoTokenizer, {loader}",
            "",
            f'model = {loader}.from_pretrained("FOLDER_OR_REPOSITORY")',
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_REPOSITORY")',
        ]
        return "```python\n" + "\n".join(lines) + "\n```"

    def _data_rows(self) -> list[tuple[str, ...]]:
        # Several phases can share a data set.
        distinct = {manifest.fingerprint: manifest for manifest in self.data}
        return [
            (f"{m.samples:,}", f"{m.tokens:,}", f"{m.seq_len:,}", f"`{fingerprint}`")
            for fingerprint, m in distinct.items()
        ]

    def _metrics(self) -> str:
        rows = [(f"`{name}`", f"{value:.4f}") for name, value in self.metrics.items()]
        return _table(("held out", ""), rows)

    def _provenance(self) -> list[tuple[str, str]]:
        facts = {
            "checkpoint": f"`{self.checkpoint}`",
            "its weights": "" if self.weights == "trained" else _as_code(self.weights),
            "SHA-256 of its marker": f"`{self.checkpoint_sha256}`",
            "digest of all samples, step by step (`elastrata audit`)": _as_code(self.digest),
            "SHA-256 of the weights it began with": _as_code(
                self.parent.sha256 if self.parent else None
            ),
            "MLflow run": _as_code(self.mlflow_run_id),
            "tokenizer": _as_code(self.data[0].tokenizer_fingerprint),
        }
        # Unknown facts are empty and left out.
        return [(what, value) for what, value in facts.items() if value]


def learning_values(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe values that affect learning, without those about location and execution."""
    values: dict[str, Any] = _drop_changeable(dict(recipe), "")
    return values


def _drop_changeable(tree: Any, path: str) -> Any:
    """Return a nested value without the keys that may change."""
    if isinstance(tree, list):
        return [_drop_changeable(value, f"{path}{number}.") for number, value in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    return {
        key: _drop_changeable(value, f"{path}{key}.")
        for key, value in tree.items()
        # The same keys may change inside a phase.
        if _PHASE.sub("", f"{path}{key}") not in _LEFT_OUT
    }


def _as_code(text: str | None) -> str:
    return f"`{text}`" if text else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
