"""The GPT workload: recipe keys and the engine's interface."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import override

from elastrata.workload.hf_folder import AS_TRAINED, WeightForm
from elastrata.workload.hf_mapping import Counterpart
from elastrata.workload.model_spec import ModelSpec
from elastrata.workload.workload import TransformersNames
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_workloads.gpt.hf import FAMILIES, family_of
from elastrata_workloads.gpt.objective import collate
from elastrata_workloads.gpt.shape import Activation, Bias, GptShape, Positions
from elastrata_workloads.unpadded.batch import UnpaddedBatch
from elastrata_workloads.unpadded.loss import loss_terms
from elastrata_workloads.unpadded.shapes import Norm, RotaryScaling
from elastrata_workloads.unpadded.workload import (
    Heads,
    Small,
    UnpaddedTransformer,
    Width,
    check_divides,
    check_head_is_even,
    has_frame,
)

if TYPE_CHECKING:
    from elastrata_workloads.gpt.model import GptModel

# Llama rounds the width of its feed-forward up to a multiple of this.
_GATED_MULTIPLE = 256


class Gpt(UnpaddedTransformer):
    """Decoder with next-token pre-training, in the style of GPT-2 (Radford et al. 2019), of Llama
    (Touvron et al. 2023), or between them.

    The defaults are GPT-2 of 124 million parameters. Llama's style is `positions: rotary`,
    `activation: swiglu`, `norm: rms`, `bias: false` and `tied_embeddings: false`.
    """

    predicts: ClassVar = "lm"

    name: Literal["gpt"] = "gpt"
    """GPT."""
    num_kv_heads: Heads | None = None
    """Heads of keys and values, each shared by several query heads (grouped-query attention). Must
    divide `num_heads`, the default."""
    head_size: Heads | None = None
    """Features of a head. Default: `hidden_size` / `num_heads`, which must then be whole."""
    intermediate_size: Width | None = None
    """Width of the feed-forward. Default: 4 times `hidden_size`; with swiglu 8/3 times, rounded up
    to a multiple of 256, as in Llama."""
    max_positions: Annotated[int, Field(gt=0, le=2**24)] = 1024
    """Maximum sample length, in tokens; with learned positions, rows of the position table."""
    positions: Positions = "learned"
    """learned: a table added to the embeddings. rotary: rotation of queries and keys."""
    rotary_base: Annotated[float, Field(gt=0, le=1e15)] = 10_000.0
    """rotary only: base of the wavelengths; larger for longer samples."""
    rotary_scaling: RotaryScaling | None = None
    """rotary only: slower rotation for samples that are longer than those a model began with, as in
    Llama 3.1."""
    window: Annotated[int, Field(gt=1, le=2**24)] | None = None
    """Number of tokens that a token attends to, itself included, as in Mistral. Default: all
    earlier ones."""
    activation: Activation = "gelu"
    """Activation of the feed-forward. gelu: two matrices, GPT-2's tanh approximation. swiglu: three
    matrices."""
    norm: Norm = "layer"
    """Normalisation. layer: LayerNorm. rms: RMSNorm."""
    norm_eps: Small = 1e-5
    """Number added to variances, or mean squares, before the square root."""
    bias: Bias = True
    """Whether projections and LayerNorms have biases. RMSNorm has none. qkv: only the projections
    to queries, keys and values, as in Qwen2.5. attention: these and attention's output."""
    tied_embeddings: bool = True
    """Whether the head shares the token embedding's weights."""
    qk_norm: bool = False
    """Whether to apply the `norm` to every head's queries and keys, which keeps attention's logits
    small at large learning rates (Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv
    2302.05442). Exported as a Qwen3 in Llama's style with `bias: false`, else refused."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of zeroing a hidden activation (embeddings and residual branches, never attention
    weights). 0: one pass over much text does not overfit."""
    initializer_range: Small = 0.02
    """Standard deviation of the initial weights; over the square root of 2 `num_layers` for
    projections to the residual stream."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Gpt:
        if self.num_kv_heads is not None:
            check_divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        if self.positions == "rotary":
            check_head_is_even(
                self.head_width, "head_size" if self.head_size else "hidden_size / num_heads"
            )
        if self.positions == "learned" and self.rotary_scaling is not None:
            raise ValueError("rotary_scaling needs positions: rotary")
        return self

    @override
    def check_heads(self) -> None:
        """Check that heads have a whole number of features.

        Raises:
            ValueError: they have not.
        """
        if self.head_size is None:
            super().check_heads()

    @property
    @override
    def head_width(self) -> int:
        """Number of features of a head."""
        return self.head_size or super().head_width

    def architecture(self) -> dict[str, Any]:
        """Return the keys that define the architecture, without initialisation, dropout and
        kernels."""
        keys = ("hidden_size", "num_layers", "num_heads", "positions", "activation", "norm")
        more = ("norm_eps", "bias", "qk_norm", "tied_embeddings", "rotary_scaling", "window")
        # Without a position table, `max_positions` only limits the length of samples.
        position = "max_positions" if self.positions == "learned" else "rotary_base"
        return {
            **{key: getattr(self, key) for key in (*keys, *more, position)},
            "num_kv_heads": self.num_kv_heads or self.num_heads,
            "head_size": self.head_width,
            "intermediate_size": self.inner_size,
        }

    @classmethod
    def settings_of(cls, config: Any) -> dict[str, Any] | None:
        """Return the workload's settings for a model of one of `FAMILIES`, or None for another
        model.

        Raises:
            UserError: the configuration has a part that this decoder lacks.
        """
        family = FAMILIES.get(config.model_type)
        if family is None:
            return None
        if missing_parts := family.unsupported(config):
            raise UserError(f"workload gpt has no {', '.join(missing_parts)}")
        return family.from_config(config)

    def counterpart(self, vocabulary: Vocabulary) -> Counterpart:
        """Return the mapping of parameters to the first of `FAMILIES` that has such a model.

        Raises:
            UserError: transformers has no such model.
        """
        shape = self.shape(self.num_ids(vocabulary))
        return family_of(shape).counterpart(shape)

    def problems(self, manifest: Manifest) -> list[str]:
        """Return one line per reason why GPT cannot train on this data set."""
        lines = []
        if manifest.pairs:
            lines.append(
                "workload: gpt predicts running text; this data set has sentence pairs, half of "
                "them random: prepare it without pairs"
            )
        return [*lines, *self.size_problems(manifest)]

    def advice(self, manifest: Manifest) -> list[str]:
        """Return one line if the tokenizer is one for BERT.

        Besides padding and mask, such a tokenizer has tokens for the start, the end and unknown
        words.
        """
        if manifest.vocabulary.mask_id is None or not has_frame(manifest.vocabulary):
            return []
        return [
            "its tokenizer has a mask token, as BERT's have, and no end of text: a gpt would also "
            "learn to write [CLS] and [SEP]; prepare with tokenizer.train: bpe, or --tokenizer bpe"
        ]

    def build_model(self, vocabulary: Vocabulary, seq_len: int) -> GptModel:
        """Return an unsharded model on the current device, initialised from torch's generator."""
        # Imported here: it loads torch's compiler, which takes a second and drivers do not need.
        from elastrata_workloads.gpt.model import GptModel

        return GptModel(self.shape(self.num_ids(vocabulary)))

    @override
    def divided_sizes(self) -> dict[str, int]:
        """Return the sizes that tensor parallelism divides, by key."""
        return {**super().divided_sizes(), "num_kv_heads": self.num_kv_heads or self.num_heads}

    def collate(self, rows: Rows, vocabulary: Vocabulary, seed: int) -> UnpaddedBatch:
        """Return a micro-batch in which every token but a document's last predicts the next one.

        The dropout masks depend only on seed, epoch and sample.
        """
        terms = loss_terms(self.predicts, self.z_loss)
        return collate(
            rows, pad_id=vocabulary.pad_id, seed=seed, dropout=self.dropout > 0, terms=terms
        )

    @property
    def exported_as(self) -> TransformersNames:
        """The names by which transformers loads an export: as a causal language model."""
        return TransformersNames(loader="AutoModelForCausalLM", task="text-generation")

    def export(
        self,
        state: Mapping[str, Tensor],
        vocabulary: Vocabulary,
        seq_len: int,
        tokenizer: Path | None,
        path: Path,
        form: WeightForm = AS_TRAINED,
    ) -> None:
        """Write a folder that transformers' `AutoModelForCausalLM.from_pretrained` can load.

        Raises:
            UserError: transformers has no such model.
        """
        # Imported here: training does not need safetensors.
        from elastrata_workloads.gpt.hf import export

        export(self.shape(self.num_ids(vocabulary)), state, tokenizer, path, form)

    def model_spec(self, vocabulary: Vocabulary, seq_len: int) -> ModelSpec:
        """Return the quantities that determine memory, time and FLOPs."""
        return self.shape(self.num_ids(vocabulary)).model_spec(seq_len)

    def shape(self, num_ids: int) -> GptShape:
        """Return the model's shape for a vocabulary of `num_ids` ids."""
        heads = {
            "num_kv_heads": self.num_kv_heads or self.num_heads,
            "head_size": self.head_width,
        }
        shared_values = {**self.same_in(GptShape), **heads}
        return GptShape(**shared_values, num_ids=num_ids, num_embeddings=self.num_rows(num_ids))

    @property
    @override
    def longest(self) -> int:
        return self.max_positions

    @property
    @override
    def inner_size(self) -> int:
        """Width of the feed-forward."""
        if self.intermediate_size or self.activation == "gelu":
            return super().inner_size
        # 8/3 instead of 4: with three matrices the feed-forward then has as many weights as with
        # two.
        size = 8 * self.hidden_size // 3
        return size + -size % _GATED_MULTIPLE


def from_transformers(folder: Path | str) -> tuple[Gpt, dict[str, Tensor]]:
    """Load a folder written by transformers' `save_pretrained` or by `elastrata export`.

    Returns:
        The workload, and the state dict for its model with as many ids as the folder's model.

    Raises:
        UserError: the folder has another kind of model, or one with a part that ours lacks.
    """
    # Imported here: it takes seconds, and workers never import models.
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(folder)
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UserError(f"{folder}: a {config.model_type}: expected {', '.join(FAMILIES)}")
    if missing_parts := family.unsupported(config):
        raise UserError(f"{folder}: workload gpt has no {', '.join(missing_parts)}")
    workload = Gpt.model_validate(family.from_config(config))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    table = family.counterpart(workload.shape(config.vocab_size))
    return workload, table.to_ours(table.origins, model.state_dict())
