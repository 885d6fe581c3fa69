"""Base class of the workloads on concatenated samples, and the bounds of their keys."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from torch import nn
from typing_extensions import override

from elastrata.device.capabilities import DeviceCapabilities
from elastrata.workload.batch import Batch
from elastrata.workload.hf_mapping import HasCounterpart
from elastrata.workload.workload import Loss, PipelineParallel, PlannableWorkload, TensorParallel
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_workloads.unpadded.batch import UnpaddedBatch, fill_to_equal_length
from elastrata_workloads.unpadded.shapes import Kernel, interrupts_graphs, kernel_substitutions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
from elastrata_pipelines.errors import pluralize

Layers = Annotated[int, Field(gt=0, le=10_000)]
"""Number of blocks."""
Width = Annotated[int, Field(gt=0, le=2**24)]
"""Number of features per token."""
Heads = Annotated[int, Field(gt=0, le=2**16)]
"""Number of heads per block."""
Small = Annotated[float, Field(gt=0, le=1e3)]
"""A small number, such as one added to variances, or a standard deviation of initial weights."""
_MOST_WEIGHTS = 10**15


def check_divides(name: str, value: int, of: str, total: int) -> None:
    """Check that a size divides another one.

    Raises:
        ValueError: it does not; the message suggests the nearest divisor.
    """
    if total % value:
        closest = min(_divisors(total), key=lambda n: abs(n - value))
        raise ValueError(
            f"{name} ({value}) must divide {of} ({total}); the nearest divisor is {closest}"
        )


def check_head_is_even(head_size: int, name: str = "hidden_size / num_heads") -> None:
    """Check that heads have an even number of features, which rotary positions need.

    Raises:
        ValueError: they have an odd number.
    """
    if head_size % 2:
        raise ValueError(
            f"{name} ({head_size}) must be even with rotary positions, which act on pairs of "
            "features"
        )


def check_weights(num_layers: int, hidden_size: int, intermediate_size: int | None) -> None:
    """Check that the model is small enough for any existing cluster.

    Raises:
        ValueError: its blocks have more than 10^15 weights.
    """
    inner = intermediate_size or 4 * hidden_size
    weights = num_layers * hidden_size * (4 * hidden_size + 2 * inner)
    if weights > _MOST_WEIGHTS:
        raise ValueError(
            f"num_layers ({num_layers}), hidden_size ({hidden_size}) and intermediate_size "
            f"({inner}) make {weights:.1e} weights: expected at most {_MOST_WEIGHTS:.0e}"
        )


# A tokenizer for running text has a single such token, its end of text.
_BERTS_FRAMING = 3
"""Number of framing tokens of a BERT tokenizer: `[CLS]`, `[SEP]` and `[UNK]`."""


def has_frame(vocabulary: Vocabulary) -> bool:
    """Return whether a tokenizer has the tokens that BERT's put around samples."""
    framing = {*vocabulary.special_ids} - {vocabulary.pad_id, vocabulary.mask_id}
    return len(framing) >= _BERTS_FRAMING


def _divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


class UnpaddedTransformer(PlannableWorkload, TensorParallel, PipelineParallel, HasCounterpart):
    """A transformer on concatenated samples, whose model is a `Stack`."""

    hidden_size: Width = 768
    """Width of the residual stream."""
    num_layers: Layers = 12
    """Number of transformer blocks."""
    num_heads: Heads = 12
    """Attention heads per block; must divide `hidden_size`."""
    intermediate_size: Width | None = None
    """Width of the feed-forward. Default: 4 times `hidden_size`."""
    z_loss: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Coefficient of a loss term that keeps logits small: the mean squared logarithm of the sum of
    their exponentials (Zoph et al. 2022, arXiv 2202.08906). 0: none; PaLM uses 1e-4 (Chowdhery et
    al. 2022, arXiv 2204.02311)."""
    embedding_multiple: Annotated[int, Field(gt=0, le=2**20)] = 1
    """Multiple to which the embedding table's rows are rounded up, for faster GPU kernels (64 is
    common). Added rows take no part in the loss and are not exported."""
    vocab_size: Annotated[int, Field(gt=0, le=2**32)] | None = None
    """Ids of the model. Default: the tokenizer's, the least. Published models often have more rows
    than their tokenizer has ids; `begin_with` sets this key to keep them."""
    attention: Kernel = "auto"
    """Attention kernel, without padding. varlen: one call for all samples, in bf16 on GPUs of
    compute capability 8.0 and above. dense: one call per run of samples of equal length, on any
    device. auto: varlen if available."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        self.check_heads()
        check_weights(self.num_layers, self.hidden_size, self.intermediate_size)
        return self

    def check_heads(self) -> None:
        """Check that heads have a whole number of features.

        Raises:
            ValueError: they have not.
        """
        check_divides("num_heads", self.num_heads, "hidden_size", self.hidden_size)

    @property
    def head_width(self) -> int:
        """Number of features of a head."""
        return self.hidden_size // self.num_heads

    @property
    @abstractmethod
    def longest(self) -> int:
        """Number of tokens of the longest sample that the model accepts."""

    @property
    def inner_size(self) -> int:
        """Width of the feed-forward."""
        return self.intermediate_size or 4 * self.hidden_size

    def same_in(self, shape: type[Any]) -> dict[str, Any]:
        """Return the values of the fields that a shape and this workload have alike."""
        names = {field.name for field in fields(shape)} & type(self).model_fields.keys()
        values = {name: getattr(self, name) for name in names}
        return {**values, "intermediate_size": self.inner_size}

    @override
    def num_ids(self, vocabulary: Vocabulary) -> int:
        """Return `vocab_size`, or the tokenizer's number of ids if that is larger."""
        return max(vocabulary.size, self.vocab_size or 0)

    @override
    def with_ids(self, num_ids: int) -> Self:
        """Return this workload with a model of `num_ids` ids."""
        return self.model_copy(update={"vocab_size": num_ids})

    def num_rows(self, num_ids: int) -> int:
        """Return the number of embedding rows for `num_ids` ids."""
        return num_ids + -num_ids % self.embedding_multiple

    def size_problems(self, manifest: Manifest) -> list[str]:
        """Return one line if a data set has samples that are too long for the model, and one if it
        has more ids."""
        lines, num_ids = [], manifest.vocabulary.size
        if manifest.seq_len > self.longest:
            lines.append(
                f"workload.max_positions: {self.longest}, but this data set has samples "
                f"of up to {pluralize(manifest.seq_len, 'token')}"
            )
        if self.vocab_size is not None and self.vocab_size < num_ids:
            lines.append(
                f"workload.vocab_size: {self.vocab_size}: expected at least {num_ids}, the ids of "
                "this data set's tokenizer"
            )
        return lines

    @override
    def substitutions(self, capabilities: DeviceCapabilities, dtype: torch.dtype) -> list[str]:
        """Return one line if `attention` requests a kernel that is unavailable."""
        return kernel_substitutions(self.attention, capabilities, dtype, self.head_width)

    @override
    def interrupts_graphs(self, capabilities: DeviceCapabilities, dtype: torch.dtype) -> bool:
        """Return whether attention breaks compiled graphs: if it is dense, on a GPU."""
        return interrupts_graphs(self.attention, capabilities.capability, dtype, self.head_width)

    @override
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the transformer blocks, first to last."""
        # Imported here, as below: it loads torch's compiler, which takes a second and drivers do
        # not need.
        from elastrata_workloads.unpadded import stack

        return stack.blocks(model)

    @override
    def tensor_problems(self, size: int) -> list[str]:
        """Return one line if some sizes are not multiples of `parallel.tensor`."""
        sizes = self.divided_sizes()
        if all(total % size == 0 for total in sizes.values()):
            return []
        # A valid size divides all of them, so it divides their greatest common divisor.
        common = math.gcd(*sizes.values())
        closest = min(_divisors(common), key=lambda n: abs(n - size))
        named = ", ".join(f"workload.{name} ({total})" for name, total in sizes.items())
        return [
            f"parallel.tensor: {size}: expected a divisor of {named}; the nearest divisor is "
            f"{closest}"
        ]

    def divided_sizes(self) -> dict[str, int]:
        """Return the sizes that tensor parallelism divides, by key."""
        return {"num_heads": self.num_heads, "intermediate_size": self.inner_size}

    @override
    def tensor_parallel(self, model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
        """Shard heads, feed-forwards and, if its rows divide evenly, the vocabulary.

        `embedding_multiple` can make the rows divide evenly.
        """
        from elastrata_workloads.unpadded import stack
        from elastrata_workloads.unpadded.stack import tensor_parallel_plan
        from elastrata_workloads.unpadded.tensor_parallel import shard_model

        styles = tensor_parallel_plan(stack.as_stack(model), mesh.size(), sequence=sequence)
        shard_model(model, stack.blocks(model), mesh, styles, sequence=sequence)

    @override
    def stage_problems(self, num_stages: int) -> list[str]:
        """Return one line if the model has fewer blocks than stages."""
        if num_stages <= self.num_layers:
            return []
        return [
            f"parallel.pipeline: {num_stages} stages in all: expected at most workload.num_layers "
            f"({self.num_layers}), one block for each"
        ]

    @override
    def stage(self, model: nn.Module, blocks: Sequence[int]) -> nn.Module:
        """Return the part of a model with these blocks.

        If the head is tied, the last stage also has the embedding table, under the same name.
        """
        from elastrata_workloads.unpadded import stack

        return stack.StackStage(stack.as_stack(model), blocks)

    @override
    def pad_to_one_length(self, batches: Sequence[Batch], multiple: int) -> list[Batch]:
        """Fill micro-batches up to equal length with tokens that predict nothing."""
        return fill_to_equal_length(batches, multiple)

    @override
    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        """Return the shape of hidden states: positions and hidden size."""
        return batch.num_positions, self.hidden_size

    @override
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the sum over predictions, and the term `z` if `z_loss` is set."""
        from elastrata_workloads.unpadded.loss import prediction_loss

        if not isinstance(batch, UnpaddedBatch):
            raise TypeError(f"expected an UnpaddedBatch, got {type(batch).__name__}")
        return prediction_loss(self.predicts, model(batch), batch, self.z_loss)

    @override
    def metrics(self) -> list[str]:
        """Return the names of loss and accuracy, and of z-loss if `z_loss` is set."""
        predictions = [f"{self.predicts}_loss", f"{self.predicts}_accuracy"]
        return [*predictions, *(["z_loss"] if self.z_loss else [])]
