"""BERT as the engine and its recipes know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from elastrata.core.batch import Batch
from elastrata.core.counterpart import Counterpart, HasCounterpart
from elastrata.core.device import DeviceCapabilities
from elastrata.core.model_spec import ModelSpec
from elastrata.core.weight_files import AS_TRAINED, WeightForm
from elastrata.core.workload import ExportedAs, Loss, PipelineParallel, Planned, TensorParallel
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_workloads.bert import transformers_bert
from elastrata_workloads.bert.batch import BertBatch
from elastrata_workloads.bert.masking import MaskingRule
from elastrata_workloads.bert.objective import Objective, loss
from elastrata_workloads.bert.shape import BertShape
from elastrata_workloads.unpadded.batch import equally_long
from elastrata_workloads.unpadded.kernel import Kernel, interrupts_graphs, substitution
from elastrata_workloads.unpadded.sizes import (
    Heads,
    Layers,
    Small,
    Width,
    check_divides,
    check_weights,
    stage_problems,
    tensor_problems,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from elastrata_workloads.bert.model import BertModel


class Bert(Planned, TensorParallel, PipelineParallel, HasCounterpart):
    """Bidirectional encoder with masked-language-model pre-training (Devlin et al. 2019).

    The defaults are BERT-base.
    """

    predicts: ClassVar = "mlm"

    name: Literal["bert"] = "bert"
    """This workload."""
    hidden_size: Width = 768
    """Width of the residual stream."""
    num_layers: Layers = 12
    """Number of transformer blocks."""
    num_heads: Heads = 12
    """Attention heads per block; must divide `hidden_size`."""
    intermediate_size: Width | None = None
    """Width of the feed-forward; default: 4 times `hidden_size`."""
    max_positions: Annotated[int, Field(gt=0, le=2**24)] = 512
    """Longest sample the model can take, in tokens: rows of the position table."""
    layer_norm_eps: Small = 1e-12
    """Added to variances before the square root."""
    qk_norm: bool = False
    """Whether every head's query and key are normalised, by a LayerNorm, before they meet: so
    attention's logits stay small at large learning rates (Henry et al. 2020, arXiv 2010.04245;
    Dehghani et al. 2023, arXiv 2302.05442). transformers has no such BERT: the export is
    refused."""
    z_loss: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Coefficient of a loss term that keeps logits from drifting: the mean squared logarithm of the
    sum of their exponentials (Zoph et al. 2022, arXiv 2202.08906). 0: none; PaLM has 1e-4
    (Chowdhery et al. 2022, arXiv 2204.02311)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of zeroing a hidden activation (embeddings and residual branches; never
    attention weights). 0 by default: one pass over much text does not overfit."""
    initializer_range: Small = 0.02
    """Standard deviation of the initial weights."""
    embedding_multiple: Annotated[int, Field(gt=0, le=2**20)] = 1
    """The embedding table gets rows up to a multiple of this, which GPUs multiply faster by (64 is
    common). The added rows are no ids: they take no part in the loss and are not exported."""
    mask_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of each sample's maskable tokens to predict; at least one token."""
    max_predictions: Annotated[int, Field(gt=0, le=2**24)] | None = None
    """Most predictions per sample; default: no limit."""
    whole_word: bool = False
    """Whether all pieces of a word are masked together."""
    next_sentence: bool = False
    """Whether to predict, too, if the second sentence followed the first; needs sentence pairs."""
    attention: Kernel = "auto"
    """Both without padding. varlen: one call for all samples, in bf16 on GPUs of compute
    capability 8.0 and above. dense: one call per run of samples of equal length, anywhere. auto:
    varlen where it can be had."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Bert:
        check_divides("num_heads", self.num_heads, "hidden_size", self.hidden_size)
        check_weights(self.num_layers, self.hidden_size, self.intermediate_size)
        return self

    def architecture(self) -> dict[str, Any]:
        """All that its objective, its initialization and its kernels do not concern."""
        keys = ("hidden_size", "num_layers", "num_heads", "max_positions", "layer_norm_eps")
        return {
            **{key: getattr(self, key) for key in (*keys, "qk_norm")},
            "intermediate_size": self.intermediate_size or 4 * self.hidden_size,
        }

    @classmethod
    def settings_of(cls, config: Any) -> dict[str, Any] | None:
        """The keys by which it is a BERT of transformers.

        Raises:
            UserError: that one has a part which this encoder lacks.
        """
        if config.model_type != "bert":
            return None
        if lacking := transformers_bert.unsupported(config):
            raise UserError(f"workload bert has no {', '.join(lacking)}")
        return transformers_bert.from_config(config)

    def counterpart(self, vocabulary: Vocabulary) -> Counterpart:
        """Where its parameters lie in transformers' BERT."""
        return transformers_bert.counterpart(next_sentence=self.next_sentence)

    def problems(self, manifest: Manifest) -> list[str]:
        """One line per reason why BERT cannot train on that data set; empty if it can."""
        vocabulary = manifest.vocabulary
        lines = []
        if vocabulary.mask_id is None:
            lines.append(
                "workload: bert needs a tokenizer with a mask token; this data set's has none"
            )
        if vocabulary.size <= len(set(vocabulary.special_ids)):
            lines.append("workload: bert needs tokens to mask; this data set has special ids only")
        if manifest.seq_len > self.max_positions:
            lines.append(
                f"workload.max_positions: {self.max_positions}, but this data set has samples "
                f"of up to {manifest.seq_len} tokens"
            )
        if self.next_sentence and not manifest.pairs:
            lines.append(
                "workload.next_sentence: true, but this data set has no sentence pairs; "
                "prepare it with pairs or set next_sentence to false"
            )
        return lines

    def substitutions(self, capabilities: DeviceCapabilities, dtype: torch.dtype) -> list[str]:
        """A line where `attention` asks for a kernel that is not there."""
        return substitution(self.attention, capabilities, dtype)

    def interrupts_graphs(self, capabilities: DeviceCapabilities, dtype: torch.dtype) -> bool:
        """Whether attention does: where it is dense, on a GPU."""
        return interrupts_graphs(self.attention, capabilities.capability, dtype)

    def build_model(self, vocabulary: Vocabulary, seq_len: int) -> BertModel:
        """A plain, unsharded model on the current device, drawn from torch's current generator."""
        # Imported here: it brings torch's compiler along, a second that drivers can do without.
        from elastrata_workloads.bert.model import BertModel

        return BertModel(self.shape(vocabulary))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The transformer blocks, first to last."""
        from elastrata_workloads.bert import parallel

        return parallel.blocks(model)

    def tensor_problems(self, size: int) -> list[str]:
        """A line for each size that so many ranks do not divide equally."""
        return tensor_problems(
            size,
            {
                "num_heads": self.num_heads,
                "intermediate_size": self.intermediate_size or 4 * self.hidden_size,
            },
        )

    def tensor_parallel(self, model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
        """Divides heads, feed-forwards, and the vocabulary where it has equally many rows for
        every rank (`embedding_multiple`)."""
        from elastrata_workloads.bert import parallel

        parallel.tensor_parallel(model, mesh, sequence=sequence)

    def stage_problems(self, num_stages: int) -> list[str]:
        """A line where there are fewer blocks than stages."""
        return stage_problems(num_stages, self.num_layers)

    def stage(self, model: nn.Module, blocks: Sequence[int]) -> nn.Module:
        """The part of a model with these blocks. The heads bring the table of word embeddings
        along, under the same name."""
        from elastrata_workloads.bert import parallel

        return parallel.stage(model, blocks)

    def equally_long(self, batches: Sequence[Batch], multiple: int) -> list[Batch]:
        """Fills micro-batches up with tokens that predict nothing."""
        return equally_long(batches, multiple)

    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        """Positions and hidden size."""
        return batch.num_positions, self.hidden_size

    def collate(self, rows: Rows, vocabulary: Vocabulary, seed: int) -> BertBatch:
        """A micro-batch with its masks, which depend on seed, epoch and sample alone."""
        objective = Objective(
            masking=MaskingRule(
                probability=self.mask_probability,
                whole_word=self.whole_word,
                max_predictions=self.max_predictions,
            ),
            next_sentence=self.next_sentence,
            dropout=self.dropout > 0,
            z_loss=self.z_loss > 0,
        )
        return objective.collate(rows, vocabulary, seed)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Sums over predictions: `mlm`, and `nsp` where the model predicts next sentences."""
        if not isinstance(batch, BertBatch):
            raise TypeError(f"expected a BertBatch, got {type(batch).__name__}")
        logits, next_logits = model(batch)
        return loss(logits, next_logits, batch, self.z_loss)

    def metrics(self) -> list[str]:
        """Loss and accuracy of the masked tokens, and of next sentences where it predicts them."""
        next_sentence = ["nsp_loss", "nsp_accuracy"] if self.next_sentence else []
        return [
            *("mlm_loss", "mlm_accuracy"),
            *next_sentence,
            *(["z_loss"] if self.z_loss else []),
        ]

    @property
    def exported_as(self) -> ExportedAs:
        """The names by which transformers knows its exports, with one head or both."""
        loader = "BertForPreTraining" if self.next_sentence else "AutoModelForMaskedLM"
        return ExportedAs(loader=loader, task="fill-mask")

    def export(
        self,
        state: Mapping[str, Tensor],
        vocabulary: Vocabulary,
        seq_len: int,
        tokenizer: Path | None,
        path: Path,
        form: WeightForm = AS_TRAINED,
    ) -> None:
        """Writes a folder that transformers loads."""
        # Imported here: training does without safetensors.
        from elastrata_workloads.bert.export import export

        export(self.shape(vocabulary), state, tokenizer, path, form)

    def model_spec(self, vocabulary: Vocabulary, seq_len: int) -> ModelSpec:
        """The numbers that memory, time and FLOPs are computed from."""
        return self.shape(vocabulary).model_spec(seq_len, self.mask_probability)

    def shape(self, vocabulary: Vocabulary) -> BertShape:
        """The model's shape with that vocabulary."""
        rows_missing = -vocabulary.size % self.embedding_multiple
        return BertShape(
            num_ids=vocabulary.size,
            num_embeddings=vocabulary.size + rows_missing,
            pad_id=vocabulary.pad_id,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            intermediate_size=self.intermediate_size or 4 * self.hidden_size,
            max_positions=self.max_positions,
            layer_norm_eps=self.layer_norm_eps,
            dropout=self.dropout,
            initializer_range=self.initializer_range,
            next_sentence=self.next_sentence,
            qk_norm=self.qk_norm,
            attention=self.attention,
        )
