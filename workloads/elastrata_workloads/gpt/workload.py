"""GPT as the engine and its recipes know it."""

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
from elastrata_workloads.gpt.batch import GptBatch
from elastrata_workloads.gpt.families import FAMILIES, family_of
from elastrata_workloads.gpt.objective import collate, loss
from elastrata_workloads.gpt.shape import Activation, GptShape, Norm, Positions
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

    from elastrata_workloads.gpt.model import GptModel

_GATED_MULTIPLE = 256


_BERTS_FRAMING = 3
"""`[CLS]`, `[SEP]` and `[UNK]`; a tokenizer for running text has one token that does it all."""


class Gpt(Planned, TensorParallel, PipelineParallel, HasCounterpart):
    """Decoder with next-token pre-training, in the style of GPT-2 (Radford et al. 2019), of Llama
    (Touvron et al. 2023), or between them.

    The defaults are GPT-2 of 124 million parameters. Llama's style is `positions: rotary`,
    `activation: swiglu`, `norm: rms`, `bias: false` and `tied_embeddings: false`.
    """

    predicts: ClassVar = "lm"

    name: Literal["gpt"] = "gpt"
    """This workload."""
    hidden_size: Width = 768
    """Width of the residual stream."""
    num_layers: Layers = 12
    """Number of transformer blocks."""
    num_heads: Heads = 12
    """Attention heads per block; must divide `hidden_size`."""
    num_kv_heads: Heads | None = None
    """Heads of key and value, each shared by several of the query (grouped-query attention); must
    divide `num_heads`. Default: as many as `num_heads`."""
    intermediate_size: Width | None = None
    """Width of the feed-forward; default: 4 times `hidden_size`, with swiglu 8/3 times, rounded up
    to a multiple of 256, as Llama's."""
    max_positions: Annotated[int, Field(gt=0, le=2**24)] = 1024
    """Longest sample the model can take, in tokens; with learned positions the rows of the position
    table."""
    positions: Positions = "learned"
    """learned: a table that is added to the embeddings. rotary: queries and keys are turned."""
    rotary_base: Annotated[float, Field(gt=0, le=1e15)] = 10_000.0
    """rotary only: base of the wave lengths; larger for longer samples."""
    activation: Activation = "gelu"
    """gelu: a feed-forward of two matrices, with GPT-2's tanh approximation. swiglu: of three."""
    norm: Norm = "layer"
    """layer: LayerNorm. rms: RMSNorm."""
    norm_eps: Small = 1e-5
    """Added to variances, or mean squares, before the square root."""
    bias: bool = True
    """Whether projections and LayerNorms have biases; RMSNorm has none."""
    tied_embeddings: bool = True
    """Whether the head is the token embedding."""
    qk_norm: bool = False
    """Whether every head's query and key are normalised, as `norm` says, before they meet: so
    attention's logits stay small at large learning rates (Henry et al. 2020, arXiv 2010.04245;
    Dehghani et al. 2023, arXiv 2302.05442). In Llama's style with `bias: false` the export is a
    Qwen3, else it is refused."""
    z_loss: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Coefficient of a loss term that keeps logits from drifting: the mean squared logarithm of the
    sum of their exponentials (Zoph et al. 2022, arXiv 2202.08906). 0: none; PaLM has 1e-4
    (Chowdhery et al. 2022, arXiv 2204.02311)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of zeroing a hidden activation (embeddings and residual branches; never
    attention weights). 0 by default: one pass over much text does not overfit."""
    initializer_range: Small = 0.02
    """Standard deviation of the initial weights; projections to the residual stream have that over
    the square root of 2 `num_layers`."""
    embedding_multiple: Annotated[int, Field(gt=0, le=2**20)] = 1
    """The embedding table gets rows up to a multiple of this, which GPUs multiply faster by (64 is
    common). The added rows are no ids: they take no part in the loss and are not exported."""
    attention: Kernel = "auto"
    """Both without padding. varlen: one call for all samples, in bf16 on GPUs of compute
    capability 8.0 and above. dense: one call per run of samples of equal length, anywhere. auto:
    varlen where it can be had."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Gpt:
        check_divides("num_heads", self.num_heads, "hidden_size", self.hidden_size)
        check_weights(self.num_layers, self.hidden_size, self.intermediate_size)
        if self.num_kv_heads is not None:
            check_divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        head_size = self.hidden_size // self.num_heads
        if self.positions == "rotary" and head_size % 2:
            raise ValueError(
                f"hidden_size / num_heads ({head_size}) must be even with positions: rotary, which "
                "turns features in pairs"
            )
        return self

    def architecture(self) -> dict[str, Any]:
        """All that its initialization, its dropout and its kernels do not concern."""
        keys = ("hidden_size", "num_layers", "num_heads", "positions", "activation", "norm")
        more = ("norm_eps", "bias", "qk_norm", "tied_embeddings")
        position = "max_positions" if self.positions == "learned" else "rotary_base"
        return {
            **{key: getattr(self, key) for key in (*keys, *more, position)},
            "num_kv_heads": self.num_kv_heads or self.num_heads,
            "intermediate_size": self.intermediate_size or self._usual_intermediate_size(),
        }

    @classmethod
    def settings_of(cls, config: Any) -> dict[str, Any] | None:
        """The keys by which it is a GPT-2, a Llama or a Qwen3.

        Raises:
            UserError: that one has a part which this decoder lacks.
        """
        family = FAMILIES.get(config.model_type)
        if family is None:
            return None
        if lacking := family.unsupported(config):
            raise UserError(f"workload gpt has no {', '.join(lacking)}")
        settings: dict[str, Any] = family.from_config(config)
        return settings

    def counterpart(self, vocabulary: Vocabulary) -> Counterpart:
        """Where its parameters lie in GPT-2, Llama or Qwen3.

        Raises:
            UserError: transformers has no such model.
        """
        shape = self.shape(vocabulary.size)
        found: Counterpart = family_of(shape).counterpart(shape)
        return found

    def problems(self, manifest: Manifest) -> list[str]:
        """One line per reason why GPT cannot train on that data set; empty if it can."""
        lines = []
        if manifest.pairs:
            lines.append(
                "workload: gpt predicts running text; this data set has sentence pairs, half of "
                "them random: prepare it without pairs"
            )
        if manifest.seq_len > self.max_positions:
            lines.append(
                f"workload.max_positions: {self.max_positions}, but this data set has samples "
                f"of up to {manifest.seq_len} tokens"
            )
        return lines

    def advice(self, manifest: Manifest) -> list[str]:
        """A line where the tokenizer is made for BERT: beside padding and mask it has tokens that
        begin and end a sample, and one for what is unknown."""
        vocabulary = manifest.vocabulary
        framing = {*vocabulary.special_ids} - {vocabulary.pad_id, vocabulary.mask_id}
        if vocabulary.mask_id is None or len(framing) < _BERTS_FRAMING:
            return []
        return [
            "its tokenizer has a mask token, as BERT's have, and no end of text: a gpt would learn "
            "to write [CLS] and [SEP], too; prepare with tokenizer.train: bpe, or --tokenizer bpe"
        ]

    def substitutions(self, capabilities: DeviceCapabilities, dtype: torch.dtype) -> list[str]:
        """A line where `attention` asks for a kernel that is not there."""
        return substitution(self.attention, capabilities, dtype)

    def interrupts_graphs(self, capabilities: DeviceCapabilities, dtype: torch.dtype) -> bool:
        """Whether attention does: where it is dense, on a GPU."""
        return interrupts_graphs(self.attention, capabilities.capability, dtype)

    def build_model(self, vocabulary: Vocabulary, seq_len: int) -> GptModel:
        """A plain, unsharded model on the current device, drawn from torch's current generator."""
        # Imported here: it brings torch's compiler along, a second that drivers can do without.
        from elastrata_workloads.gpt.model import GptModel

        return GptModel(self.shape(vocabulary.size))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The transformer blocks, first to last."""
        from elastrata_workloads.gpt import parallel

        return parallel.blocks(model)

    def tensor_problems(self, size: int) -> list[str]:
        """A line for each size that so many ranks do not divide equally."""
        return tensor_problems(
            size,
            {
                "num_heads": self.num_heads,
                "num_kv_heads": self.num_kv_heads or self.num_heads,
                "intermediate_size": self.intermediate_size or self._usual_intermediate_size(),
            },
        )

    def tensor_parallel(self, model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
        """Divides heads, feed-forwards, and the vocabulary where it has equally many rows for
        every rank (`embedding_multiple`)."""
        from elastrata_workloads.gpt import parallel

        parallel.tensor_parallel(model, mesh, sequence=sequence)

    def stage_problems(self, num_stages: int) -> list[str]:
        """A line where there are fewer blocks than stages."""
        return stage_problems(num_stages, self.num_layers)

    def stage(self, model: nn.Module, blocks: Sequence[int]) -> nn.Module:
        """The part of a model with these blocks. A tied head brings the embeddings' table along,
        under the same name."""
        from elastrata_workloads.gpt import parallel

        return parallel.stage(model, blocks)

    def equally_long(self, batches: Sequence[Batch], multiple: int) -> list[Batch]:
        """Fills micro-batches up with tokens that predict nothing."""
        return equally_long(batches, multiple)

    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        """Positions and hidden size."""
        return batch.num_positions, self.hidden_size

    def collate(self, rows: Rows, vocabulary: Vocabulary, seed: int) -> GptBatch:
        """A micro-batch; what dropout drops depends on seed, epoch and sample alone."""
        terms = ("lm", "z") if self.z_loss else ("lm",)
        return collate(
            rows, pad_id=vocabulary.pad_id, seed=seed, dropout=self.dropout > 0, terms=terms
        )

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The sum over predictions, `lm`: every token but the last of each document. With
        `z_loss` its sum, too, `z`."""
        if not isinstance(batch, GptBatch):
            raise TypeError(f"expected a GptBatch, got {type(batch).__name__}")
        return loss(model(batch), batch, self.z_loss)

    def metrics(self) -> list[str]:
        """Loss and accuracy of the next tokens, and z-loss where there is one."""
        return ["lm_loss", "lm_accuracy", *(["z_loss"] if self.z_loss else [])]

    @property
    def exported_as(self) -> ExportedAs:
        """The names by which transformers knows its exports: a language model."""
        return ExportedAs(loader="AutoModelForCausalLM", task="text-generation")

    def export(
        self,
        state: Mapping[str, Tensor],
        vocabulary: Vocabulary,
        seq_len: int,
        tokenizer: Path | None,
        path: Path,
        form: WeightForm = AS_TRAINED,
    ) -> None:
        """Writes a folder that transformers' `AutoModelForCausalLM.from_pretrained` loads.

        Raises:
            UserError: the model is neither in GPT-2's style nor in Llama's or Qwen3's.
        """
        # Imported here: training does without safetensors.
        from elastrata_workloads.gpt.export import export

        export(self.shape(vocabulary.size), state, tokenizer, path, form)

    def model_spec(self, vocabulary: Vocabulary, seq_len: int) -> ModelSpec:
        """The numbers that memory, time and FLOPs are computed from."""
        return self.shape(vocabulary.size).model_spec(seq_len)

    def shape(self, num_ids: int) -> GptShape:
        """The model's shape with a vocabulary of so many ids."""
        return GptShape(
            num_ids=num_ids,
            num_embeddings=num_ids + -num_ids % self.embedding_multiple,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            intermediate_size=self.intermediate_size or self._usual_intermediate_size(),
            max_positions=self.max_positions,
            positions=self.positions,
            rotary_base=self.rotary_base,
            activation=self.activation,
            norm=self.norm,
            norm_eps=self.norm_eps,
            bias=self.bias,
            qk_norm=self.qk_norm,
            tied_embeddings=self.tied_embeddings,
            dropout=self.dropout,
            initializer_range=self.initializer_range,
            attention=self.attention,
        )

    def _usual_intermediate_size(self) -> int:
        if self.activation == "gelu":
            return 4 * self.hidden_size
        size = 8 * self.hidden_size // 3
        return size + -size % _GATED_MULTIPLE
