"""The seam for workloads: what the engine needs of a model family, and nothing more.

A workload is a part of the recipe (its hyperparameters) with the methods that give them meaning.
What only some layouts or the planner need is in classes of their own: `TensorParallel`,
`PipelineParallel`, `Planned`. It is found through the entry-point group `elastrata.workloads`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from elastrata.config import Config
from elastrata.device.capabilities import DeviceCapabilities
from elastrata.workload.batch import Batch
from elastrata.workload.hf_folder import AS_TRAINED, WeightForm
from elastrata.workload.installed import installed_workloads
from elastrata.workload.model_spec import ModelSpec
from elastrata_pipelines.deal import WorkModel
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.rows import Rows

_SHORTEST = 8
"""Tokens of the longest sample where a model's matrices are counted, which do not depend on it."""


@dataclass(frozen=True)
class Metric:
    """A sum over predictions, divided in the end by the global weight of the loss term `per`."""

    total: Tensor
    per: str


SOURCE_LOSS = "loss/"
"""Before a source's name: its loss among the metrics, and its predictions among the weights of a
batch."""


@dataclass(frozen=True)
class Loss:
    """Sums, never means: the engine divides once, by the weight of the global batch."""

    terms: Mapping[str, Tensor]
    """Per loss term a scalar sum; the training loss adds up sum / global weight over terms."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """For example `mlm_accuracy`: the number of correct predictions, per `mlm`. Detached."""

    def detached(self) -> Loss:
        """A copy without the graph of its computation."""
        return Loss({term: total.detach() for term, total in self.terms.items()}, self.metrics)


@dataclass(frozen=True, kw_only=True)
class ExportedAs:
    """The names by which transformers knows an exported model."""

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
        """The names by which transformers knows its exports; by default a model without a head."""
        return ExportedAs()

    def architecture(self) -> dict[str, Any]:
        """The keys without which weights mean nothing, with their values: a run that begins with
        weights has the same ones. By default all but `attention`, the kernel's."""
        return self.model_dump(mode="json", exclude={"name", "attention"})

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

    def interrupts_graphs(self, capabilities: DeviceCapabilities, dtype: torch.dtype) -> bool:
        """Whether a part of its blocks cannot be compiled on a machine; by default none."""
        return False

    @abstractmethod
    def build_model(self, vocabulary: Vocabulary, seq_len: int) -> nn.Module:
        """A plain, unsharded model on the current device, drawn from torch's current generator.

        Buffers may not depend on what is drawn into parameters (`Outline`)."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks, in order: the units of sharding, checkpointing and compilation."""

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
        causal. Recomputation is not counted. By default nothing is counted for attention.
        """
        return 6 * matmul_parameters(self, vocabulary) * sum(lengths)

    @abstractmethod
    def export(
        self,
        state: Mapping[str, Tensor],
        vocabulary: Vocabulary,
        seq_len: int,
        tokenizer: Path | None,
        path: Path,
        form: WeightForm = AS_TRAINED,
    ) -> None:
        """Writes a folder that transformers' `from_pretrained` loads.

        Args:
            state: the whole model's; maybe of one that reads each tensor when it is asked for it,
                so that no more than a few are in memory at once (`write_weights`).
            vocabulary: the data set's.
            seq_len: tokens of its longest sample.
            tokenizer: folder with the tokenizer's files, copied in; None: no tokenizer.
            path: the folder to write; made where it is missing.
            form: of the weights.
        """


class TensorParallel(Workload):
    """A workload whose models can be divided over ranks that compute every sample together."""

    @abstractmethod
    def tensor_problems(self, size: int) -> list[str]:
        """One line per reason why `size` ranks cannot compute this model together; empty if they
        can."""

    @abstractmethod
    def tensor_parallel(self, model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
        """Divides a plain model over the ranks of a mesh of one axis, where `tensor_problems` finds
        none: all parameters become DTensors on it.

        With one batch on all these ranks, `loss` returns the same sums on each.

        Args:
            model: as `build_model` returned it; on the meta device, or with the same weights on
                every rank.
            mesh: of one axis.
            sequence: whether tokens are divided, too, between the matrices.
        """


class PipelineParallel(Workload):
    """A workload whose models can be cut into the stages of a pipeline."""

    @abstractmethod
    def stage_problems(self, num_stages: int) -> list[str]:
        """One line per reason why this model cannot be cut into so many stages; empty if it can."""

    @abstractmethod
    def block_costs(self, vocabulary: Vocabulary, seq_len: int) -> list[int]:
        """Cost of every block for a sample of `seq_len` tokens, in FLOPs of a forward pass; what
        comes before the blocks is counted in the first one, what comes behind in the last."""

    @abstractmethod
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

    @abstractmethod
    def equally_long(self, batches: Sequence[Batch], multiple: int) -> list[Batch]:
        """These micro-batches, all filled up to one number of positions, a multiple of `multiple`:
        no sum and no gradient changes."""

    @abstractmethod
    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        """Shape of what goes from stage to stage for a micro-batch; positions are dim 0."""


class Planned(Workload):
    """A workload of transformers of equal blocks, whose memory and time can be planned. The deal,
    the MFU and the stages of a pipeline then follow from the same numbers. Comes first among the
    bases of a class."""

    predicts: ClassVar[str]
    """The loss term that the head gives logits for."""

    @abstractmethod
    def model_spec(self, vocabulary: Vocabulary, seq_len: int) -> ModelSpec:
        """The numbers that memory, time and FLOPs are computed from."""

    @override
    def work(self, vocabulary: Vocabulary) -> WorkModel:
        return self.model_spec(vocabulary, _SHORTEST).work

    @override
    def flops(
        self, lengths: Sequence[int], weights: Mapping[str, float], vocabulary: Vocabulary
    ) -> int:
        spec = self.model_spec(vocabulary, _SHORTEST)
        return int(spec.training_flops(lengths, int(weights[self.predicts])))

    def block_costs(self, vocabulary: Vocabulary, seq_len: int) -> list[int]:
        """For `PipelineParallel`."""
        return self.model_spec(vocabulary, seq_len).block_flops


def tensor_problems(workload: Workload, size: int) -> list[str]:
    """One line per reason why `size` ranks cannot compute a workload's model together."""
    if isinstance(workload, TensorParallel):
        return workload.tensor_problems(size)
    return [f"parallel.tensor: {size}: expected 1: workload {workload.name} cannot be divided"]


def stage_problems(workload: Workload, num_stages: int) -> list[str]:
    """One line per reason why a workload's model cannot be cut into so many stages."""
    if isinstance(workload, PipelineParallel):
        return workload.stage_problems(num_stages)
    return [f"parallel.pipeline: expected 1: workload {workload.name} cannot be cut into stages"]


def model_spec(workload: Workload, vocabulary: Vocabulary, seq_len: int) -> ModelSpec:
    """The numbers that `elastrata plan` computes memory and time from.

    Raises:
        UserError: the model is not made of equal blocks, or nobody has told how.
    """
    if not isinstance(workload, Planned):
        raise UserError(f"workload.name: {workload.name}: such models cannot be planned")
    return workload.model_spec(vocabulary, seq_len)


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
    installed = installed_workloads(name)
    if name not in installed:
        raise UserError(
            f"workload.name: '{name}': no such workload{nearest(name, installed)}; "
            f"installed: {', '.join(sorted(installed)) or 'none'}"
        )
    loaded: type[Workload] = installed[name].load()
    return loaded
