"""The interface of workloads: everything that the engine needs of a model family.

A workload is a section of the recipe (its hyperparameters) with the methods that implement it.
Interfaces of single layouts and of the planner are separate classes: `TensorParallel`,
`PipelineParallel`, `PlannableWorkload`. Workloads are found through the entry-point group
`elastrata.workloads`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from elastrata.config import Config
from elastrata.device.capabilities import DeviceCapabilities
from elastrata.workload.batch import Batch
from elastrata.workload.hf_folder import AS_TRAINED, WeightForm
from elastrata.workload.installed import find_workloads
from elastrata.workload.model_spec import ModelSpec
from elastrata_pipelines.deal import WorkModel
from elastrata_pipelines.errors import UserError, suggest_nearest
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.rows import Rows

_MINIMAL_SEQ_LEN = 8
"""Sequence length for counting the elements of a model's matrices, which do not depend on it."""


@dataclass(frozen=True)
class Metric:
    """A sum over predictions, which is finally divided by the global weight of the loss term
    `per`."""

    total: Tensor
    per: str


SOURCE_LOSS = "loss/"
"""Prefix of a source's name: of its loss among the metrics, and of its predictions among the
weights of a batch."""


@dataclass(frozen=True)
class Loss:
    """Sums, never means: the engine divides once, by the weight of the global batch."""

    terms: Mapping[str, Tensor]
    """Scalar sum by loss term. The training loss is the sum over terms of sum / global weight."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Detached metrics, such as `mlm_accuracy`: the number of correct predictions, per `mlm`."""

    def detached(self) -> Loss:
        """Return a copy without its autograd graph."""
        return Loss({term: total.detach() for term, total in self.terms.items()}, self.metrics)


@dataclass(frozen=True, kw_only=True)
class TransformersNames:
    """Names under which transformers loads an exported model."""

    loader: str = "AutoModel"
    """Class whose `from_pretrained` loads the whole model."""
    task: str = "feature-extraction"
    """Name of the pipeline that uses it."""


class Workload(Config):
    """A model family and its objective."""

    name: str
    """Name of the workload's entry point, such as `bert`."""

    @staticmethod
    def registered(name: str) -> type[Workload]:
        """Return the class of the workloads of that name.

        Raises:
            UserError: no installed workload has that name.
        """
        return workload_class(name)

    @property
    def exported_as(self) -> TransformersNames:
        """Names under which transformers loads exports; by default a model without a head."""
        return TransformersNames()

    def architecture(self) -> dict[str, Any]:
        """Return the keys that define the meaning of weights, with their values.

        A run that begins with weights must have the same values. By default these are all keys
        except `attention`, which chooses the kernel.
        """
        # Weights mean the same with every kernel of attention.
        return self.model_dump(mode="json", exclude={"name", "attention"})

    def problems(self, manifest: Manifest) -> list[str]:
        """Return one line per reason why this workload cannot train on the data set; empty by
        default."""
        return []

    def advice(self, manifest: Manifest) -> list[str]:
        """Return one line per property of the data set that suits this workload badly; empty by
        default."""
        return []

    def substitutions(self, capabilities: DeviceCapabilities, dtype: torch.dtype) -> list[str]:
        """Return one line per key that a machine cannot satisfy, with the substitute; empty by
        default.

        Args:
            capabilities: of the machine.
            dtype: type in which the model is computed.
        """
        return []

    def interrupts_graphs(self, capabilities: DeviceCapabilities, dtype: torch.dtype) -> bool:
        """Return whether a part of the blocks cannot be compiled on a machine; false by default."""
        return False

    def num_ids(self, vocabulary: Vocabulary) -> int:
        """Return the number of ids that the model has logits for; by default the tokenizer's."""
        return vocabulary.size

    def with_ids(self, num_ids: int) -> Self | None:
        """Return this workload with a model of more ids than the tokenizer has.

        By default None: there is no such model.
        """
        return None

    @abstractmethod
    def build_model(self, vocabulary: Vocabulary, seq_len: int) -> nn.Module:
        """Build a plain, unsharded model on the current device, initialised by torch's current
        generator.

        Buffers must not depend on the random values of parameters (`DeferredModel`).
        """

    @abstractmethod
    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated blocks in order: the units of sharding, checkpointing and
        compilation."""

    @abstractmethod
    def collate(self, rows: Rows, vocabulary: Vocabulary, seed: int) -> Batch:
        """Return a micro-batch of rows, which may be empty. Randomness must come from
        `SampleRng(seed, rows)`."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Run the model and return its loss.

        With an empty batch, the sums are zero, and the backward pass must still reach all
        parameters.
        """

    @abstractmethod
    def metrics(self) -> Sequence[str]:
        """Return the names of everything that `loss` reports: `<term>_loss` for every term, and
        its metrics."""

    def work(self, vocabulary: Vocabulary) -> WorkModel:
        """Return the cost of a sample by its length, for the deal, in FLOPs of a forward pass.

        By default, every matrix except embeddings is applied to every token once, and no cost grows
        with the square of the length.
        """
        return WorkModel(linear=2 * matmul_parameters(self, vocabulary), quadratic=0)

    def flops(
        self, lengths: Sequence[int], weights: Mapping[str, float], vocabulary: Vocabulary
    ) -> int:
        """Return the FLOPs of forward and backward.

        They are 6 per matmul parameter and token that it is applied to, plus attention, halved if
        it is causal. Recomputation is not counted. By default, attention is not counted.

        Args:
            lengths: lengths of the samples, or of the documents packed into them.
            weights: weights of the batches by loss term.
            vocabulary: vocabulary of the data set.
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
        """Write a folder that transformers' `from_pretrained` loads.

        Args:
            state: state dict of the whole model. It may read each tensor on access, so that only a
                few are in memory at a time (`write_weights`).
            vocabulary: vocabulary of the data set.
            seq_len: number of tokens of its longest sample.
            tokenizer: folder with the tokenizer's files, which are copied; None: no tokenizer.
            path: target folder, created if missing.
            form: format of the weights.
        """


class TensorParallel(Workload):
    """A workload whose models can be divided over ranks that compute every sample together."""

    @abstractmethod
    def tensor_problems(self, size: int) -> list[str]:
        """Return one line per reason why `size` ranks cannot compute this model together."""

    @abstractmethod
    def tensor_parallel(self, model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
        """Divide a plain model over the ranks of a mesh: all parameters become DTensors.

        `tensor_problems` must be empty. If all these ranks have the same batch, `loss` returns the
        same sums on each.

        Args:
            model: as `build_model` returned it; on the meta device, or with the same weights on
                every rank.
            mesh: a mesh with one axis.
            sequence: whether to also divide tokens between the matrices.
        """


class PipelineParallel(Workload):
    """A workload whose models can be divided into the stages of a pipeline."""

    @abstractmethod
    def stage_problems(self, num_stages: int) -> list[str]:
        """Return one line per reason why this model cannot be divided into `num_stages` stages."""

    @abstractmethod
    def block_costs(self, vocabulary: Vocabulary, seq_len: int) -> list[int]:
        """Return the cost of every block for a sample of `seq_len` tokens, in FLOPs of a forward
        pass.

        The first block includes everything before the blocks, and the last one everything after
        them.
        """

    @abstractmethod
    def stage(self, model: nn.Module, blocks: Sequence[int]) -> nn.Module:
        """Return the part of a model with these blocks: the same modules under the same names.

        The part with the first block includes everything before the blocks, and that with the last
        block everything after them. If the blocks are consecutive, the part is called with a batch
        and, except for the first part, with `hidden`: the output of the previous part. It returns
        such an output, or the model's output if it has the last block. `blocks` and `loss` accept
        it like a model.

        Args:
            model: as `build_model` returned it, maybe on the meta device, and after
                `tensor_parallel` if that applies.
            blocks: indices from 0.
        """

    @abstractmethod
    def pad_to_one_length(self, batches: Sequence[Batch], multiple: int) -> list[Batch]:
        """Return the micro-batches padded to one number of positions, a multiple of `multiple`.

        No sum and no gradient may change.
        """

    @abstractmethod
    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        """Return the shape of the hidden states between stages for a micro-batch; dim 0 are
        positions."""


class PlannableWorkload(Workload):
    """A workload of transformers with equal blocks, whose memory and time can be planned.

    The deal, MFU and the stages of a pipeline follow from the same numbers. It must be the first
    base of a class, so that its methods override the defaults.
    """

    predicts: ClassVar[str]
    """Loss term for which the head computes logits."""

    @abstractmethod
    def model_spec(self, vocabulary: Vocabulary, seq_len: int) -> ModelSpec:
        """Return the numbers that determine memory, time and FLOPs."""

    @override
    def work(self, vocabulary: Vocabulary) -> WorkModel:
        return self.model_spec(vocabulary, _MINIMAL_SEQ_LEN).work

    @override
    def flops(
        self, lengths: Sequence[int], weights: Mapping[str, float], vocabulary: Vocabulary
    ) -> int:
        # The counted FLOPs depend on the samples' lengths, not on the model's longest one.
        spec = self.model_spec(vocabulary, _MINIMAL_SEQ_LEN)
        return int(spec.training_flops(lengths, int(weights[self.predicts])))

    def block_costs(self, vocabulary: Vocabulary, seq_len: int) -> list[int]:
        """Return the block costs for `PipelineParallel`."""
        return self.model_spec(vocabulary, seq_len).block_flops


def tensor_problems(workload: Workload, size: int) -> list[str]:
    """Return one line per reason why `size` ranks cannot compute a workload's model together."""
    if isinstance(workload, TensorParallel):
        return workload.tensor_problems(size)
    return [f"parallel.tensor: {size}: expected 1: workload {workload.name} cannot be divided"]


def stage_problems(workload: Workload, num_stages: int) -> list[str]:
    """Return one line per reason why a workload's model cannot be divided into `num_stages`
    stages."""
    if isinstance(workload, PipelineParallel):
        return workload.stage_problems(num_stages)
    return [
        f"parallel.pipeline: expected 1: workload {workload.name} cannot be divided into stages"
    ]


def model_spec(workload: Workload, vocabulary: Vocabulary, seq_len: int) -> ModelSpec:
    """Return the numbers from which `elastrata plan` computes memory and time.

    Raises:
        UserError: the workload is not `PlannableWorkload`.
    """
    if not isinstance(workload, PlannableWorkload):
        raise UserError(f"workload.name: {workload.name}: the planner does not support such models")
    return workload.model_spec(vocabulary, seq_len)


@cache
def matmul_parameters(workload: Workload, vocabulary: Vocabulary) -> int:
    """Return the number of elements in all matrices of a model except embeddings."""
    with torch.device("meta"):
        # On the meta device: only shapes are counted.
        model = workload.build_model(vocabulary, _MINIMAL_SEQ_LEN)
    # By id, so that a tied matrix counts once; a head that is tied to an embedding does multiply.
    size_by_id = {
        id(parameter): parameter.numel()
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 2
    }
    return sum(size_by_id.values())


def workload_class(name: str) -> type[Workload]:
    """Return the class of the workload registered under `name`.

    Raises:
        UserError: no installed workload has that name.
    """
    installed = find_workloads(name)
    if name not in installed:
        raise UserError(
            f"workload.name: '{name}': no such workload{suggest_nearest(name, installed)}; "
            f"installed: {', '.join(sorted(installed)) or 'none'}"
        )
    # Only the chosen workload is imported.
    loaded: type[Workload] = installed[name].load()
    return loaded
