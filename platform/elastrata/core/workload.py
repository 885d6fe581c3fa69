"""The seam for workloads: what the engine needs of a model family, and nothing more.

A workload is a part of the recipe (its hyperparameters) with the methods that give them meaning.
It is found through the entry-point group `elastrata.workloads`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elastrata.config import Config
from elastrata.core.device import DeviceCapabilities
from elastrata.core.installed import installed_workloads
from elastrata.core.model_spec import ModelSpec
from elastrata_pipelines.deal import WorkModel
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.rows import Rows

_SHORTEST = 8
"""Tokens of the longest sample that a model is built for, to count its matrices."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch, ready for the model. Workloads subclass it with their tensors."""

    weights: Mapping[str, float]
    """Per loss term the weight (number of predictions) of this micro-batch, known before the
    forward pass so that the step can divide by the weight of the global batch."""
    num_positions: int
    """Token positions the model computes on, padding included."""

    def to(self, device: torch.device) -> Self:
        """The same batch with all its tensors on `device`."""
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return type(self)(**{**vars(self), **moved})


@dataclass(frozen=True)
class Metric:
    """A sum over predictions, divided in the end by the global weight of the loss term `per`."""

    total: Tensor
    per: str


@dataclass(frozen=True)
class Loss:
    """Sums, never means: the engine divides once, by the weight of the global batch."""

    terms: Mapping[str, Tensor]
    """Per loss term a scalar sum; the training loss adds up sum / global weight over terms."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """For example `mlm_accuracy`: the number of correct predictions, per `mlm`. Detached."""

    def detached(self) -> Loss:
        """The same numbers, without the way they came about."""
        return Loss({term: total.detach() for term, total in self.terms.items()}, self.metrics)


@dataclass(frozen=True, kw_only=True)
class ExportedAs:
    """What transformers knows an exported model as."""

    loader: str = "AutoModel"
    """The class whose `from_pretrained` loads all of it."""
    task: str = "feature-extraction"
    """The pipeline that uses it."""


class Workload(Config):
    """A model family with its objective."""

    name: str
    """The entry point's name: `bert`..."""

    @staticmethod
    def registered(name: str) -> type[Workload]:
        """The class of the workloads of that name.

        Raises:
            UserError: there is none.
        """
        return workload_class(name)

    @property
    def exported_as(self) -> ExportedAs:
        """What transformers knows its exports as; by default a model without a head."""
        return ExportedAs()

    def problems(self, manifest: Manifest) -> list[str]:
        """One line per reason why this workload cannot train on that data set; by default there is
        none."""
        return []

    def advice(self, manifest: Manifest) -> list[str]:
        """One line per thing about that data set which fits this workload badly, though it can
        train on it; none by default."""
        return []

    def substitutions(self, capabilities: DeviceCapabilities, dtype: torch.dtype) -> list[str]:
        """One line for each of its keys that asks for what a machine lacks, with what is used
        instead; none by default. `dtype` is what the model is computed in."""
        return []

    @abstractmethod
    def build_model(self, vocabulary: Vocabulary, seq_len: int) -> nn.Module:
        """A plain, unsharded model on the current device, drawn from torch's current generator.

        Its parameters may be dropped as modules get them (`partial_model`): what is then done to
        one must not read it."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks, in order: the units of sharding, checkpointing and compilation."""

    def matrices(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that `sparsity` may hold at zero, by name: matrices of attention and
        feed-forward, each applied once to every token. By default all matrices of the blocks.

        Args:
            model: plain or sharded, with its numbers or without.
        """
        inside = {id(p) for block in self.blocks(model) for p in block.parameters() if p.ndim == 2}
        return {name: p for name, p in model.named_parameters() if id(p) in inside}

    def tensor_problems(self, size: int) -> list[str]:
        """One line per reason why `size` ranks cannot compute this model together; empty if they
        can. By default a workload has no plan for it."""
        return [f"parallel.tensor: {size}: expected 1: workload {self.name} cannot be divided"]

    def tensor_parallel(self, model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
        """Divides a plain model over the ranks of a mesh of one axis, where `tensor_problems` finds
        none: all parameters become DTensors on it.

        With the same batch on all these ranks, `loss` returns the same sums on each.

        Args:
            model: as `build_model` returned it, with the same weights on every rank.
            mesh: of one axis.
            sequence: whether tokens are divided, too, between the matrices.
        """
        raise NotImplementedError(self.name)

    def stage_problems(self, num_stages: int) -> list[str]:
        """One line per reason why this model cannot be cut into so many stages of a pipeline; empty
        if it can. By default a workload has no plan for it."""
        return [f"parallel.pipeline: expected 1: workload {self.name} cannot be cut into stages"]

    def block_costs(self, vocabulary: Vocabulary, seq_len: int) -> list[int]:
        """Cost of every block for a sample of `seq_len` tokens, in FLOPs of a forward pass; what
        comes before the blocks is counted in the first one, what comes behind in the last."""
        raise NotImplementedError(self.name)

    def stage(self, model: nn.Module, blocks: Sequence[int]) -> nn.Module:
        """The part of a model with these of its blocks, and with what comes before the first and
        behind the last one where these are among them: the same modules under the same names.

        Where the blocks follow one another it is called with a batch and, but for the first part,
        `hidden`: the output of the part before. It returns such an output, or, with the last
        block, what the model returns. `blocks` and `loss` take it like a model.

        Args:
            model: as `build_model` returned it, maybe on the meta device, after `tensor_parallel`
                where there is any.
            blocks: numbers from 0.
        """
        raise NotImplementedError(self.name)

    def equally_long(self, batches: Sequence[Batch], multiple: int) -> list[Batch]:
        """The same micro-batches, all filled up to one number of positions, a multiple of
        `multiple`: no sum and no gradient changes."""
        raise NotImplementedError(self.name)

    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        """Shape of what goes from stage to stage for a micro-batch; positions are dim 0."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def collate(self, rows: Rows, vocabulary: Vocabulary, seed: int) -> Batch:
        """A micro-batch from rows, maybe from none. All randomness is `SampleRng(seed, rows)`'s."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Runs the model. With an empty batch the sums are zero and gradients still flow."""

    @abstractmethod
    def metrics(self) -> Sequence[str]:
        """Names of what `loss` tells: `<term>_loss` for every term, and its metrics."""

    def work(self, vocabulary: Vocabulary) -> WorkModel:
        """Cost of a sample by its length, for the deal; in FLOPs of a forward pass.

        By default every matrix but those of embeddings is applied to every token once, and nothing
        grows with the square of the length."""
        return WorkModel(linear=2 * matmul_parameters(self, vocabulary), quadratic=0)

    def flops(
        self, lengths: Sequence[int], weights: Mapping[str, float], vocabulary: Vocabulary
    ) -> int:
        """FLOPs of forward and backward for samples, or packed documents, of these lengths.

        `weights` are those of the batches.

        6 per matmul parameter and token it is applied to, plus attention, halved where it is
        causal. Recomputation is not counted. By default as `work` has it by default.
        """
        return 6 * matmul_parameters(self, vocabulary) * sum(lengths)

    def transformer(self, vocabulary: Vocabulary, seq_len: int) -> ModelSpec:
        """The numbers that `elastrata plan` computes memory and time from.

        Raises:
            UserError: the model is not made of equal blocks, or nobody has told how.
        """
        raise UserError(f"workload.name: {self.name}: such models cannot be planned")

    @abstractmethod
    def export(
        self,
        state: Mapping[str, Tensor],
        vocabulary: Vocabulary,
        seq_len: int,
        tokenizer: Path | None,
        path: Path,
    ) -> None:
        """Writes a folder that transformers' `from_pretrained` loads; `tokenizer` is copied in."""


@cache
def matmul_parameters(workload: Workload, vocabulary: Vocabulary) -> int:
    """Elements of all matrices of a model but those that are looked up in, as embeddings are."""
    with torch.device("meta"):
        model = workload.build_model(vocabulary, _SHORTEST)
    multiplied = {
        id(parameter): parameter.numel()
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 2
    }
    return sum(multiplied.values())


def workload_class(name: str) -> type[Workload]:
    """The workload registered under `name`.

    Raises:
        UserError: there is none.
    """
    found = installed_workloads(name)
    if name not in found:
        raise UserError(
            f"workload.name: '{name}': no such workload{nearest(name, found)}; "
            f"installed: {', '.join(sorted(found)) or 'none'}"
        )
    loaded: type[Workload] = found[name].load()
    return loaded
