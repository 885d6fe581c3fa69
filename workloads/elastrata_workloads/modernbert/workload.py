"""The ModernBERT workload: recipe keys and the engine's interface."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import override

from elastrata.workload.hf_folder import AS_TRAINED, WeightForm
from elastrata.workload.hf_mapping import Counterpart
from elastrata.workload.model_spec import ModelSpec
from elastrata.workload.workload import TransformersNames
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_workloads.modernbert import hf
from elastrata_workloads.modernbert.shape import ModernBertShape
from elastrata_workloads.unpadded.batch import UnpaddedBatch
from elastrata_workloads.unpadded.loss import loss_terms
from elastrata_workloads.unpadded.masked_lm import MaskedTransformer, mask_rows
from elastrata_workloads.unpadded.workload import Layers, Small, Width, check_head_is_even

if TYPE_CHECKING:
    from elastrata_workloads.modernbert.model import ModernBertModel

Base = Annotated[float, Field(gt=0, le=1e15)]


class ModernBert(MaskedTransformer):
    """Bidirectional encoder with rotary positions, a gated feed-forward and windows in two of three
    layers, pre-trained on masked tokens (Warner et al. 2024, arXiv 2412.13663).

    The defaults are ModernBERT-base.
    """

    name: Literal["modernbert"] = "modernbert"
    """ModernBERT."""
    num_layers: Layers = 22
    """Number of transformer blocks."""
    intermediate_size: Width | None = None
    """Width of the feed-forward, of three matrices. Default: 3/2 times `hidden_size`."""
    max_positions: Annotated[int, Field(gt=0, le=2**24)] = 8192
    """Maximum sample length, in tokens. There is no position table."""
    window: Annotated[int, Field(gt=0, le=2**24, multiple_of=2)] = 128
    """Tokens around each that a local layer attends to, half on each side."""
    global_every: Layers = 3
    """Interval of global layers, from the first on, which attend to all tokens of a sample; the
    other, local ones only within `window`."""
    global_rotary_base: Base = 160_000.0
    """Base of the wavelengths of global layers; larger for longer samples."""
    local_rotary_base: Base = 10_000.0
    """Base of the wavelengths of local layers."""
    norm_eps: Small = 1e-5
    """Number added to variances before the square root."""
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of zeroing an element of attention's output, never attention weights."""
    initializer_range: Small = 0.02
    """Standard deviation of the initial weights, truncated at twice that; over the square root of 2
    `num_layers` for projections to the residual stream."""
    mask_probability: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of each sample's maskable tokens to predict; at least one token."""

    @model_validator(mode="after")
    def _heads_turn(self) -> ModernBert:
        check_head_is_even(self.head_width)
        return self

    @override
    def architecture(self) -> dict[str, Any]:
        """Return the keys that define the architecture, without objective, initialisation and
        kernels."""
        keys = ("hidden_size", "num_layers", "num_heads", "window", "norm_eps")
        bases = ("global_rotary_base", "local_rotary_base")
        values = {key: getattr(self, key) for key in (*keys, *bases)}
        every = min(self.global_every, self.num_layers)  # the first alone, whatever it says beyond
        return {**values, "global_every": every, "intermediate_size": self.inner_size}

    @classmethod
    def settings_of(cls, config: Any) -> dict[str, Any] | None:
        """Return the workload's settings for a ModernBERT of transformers, or None for another
        model.

        Raises:
            UserError: the configuration has a part that this encoder lacks.
        """
        if config.model_type != "modernbert":
            return None
        if missing_parts := hf.find_unsupported(config):
            raise UserError(f"workload modernbert has no {', '.join(missing_parts)}")
        return hf.from_config(config)

    def counterpart(self, vocabulary: Vocabulary) -> Counterpart:
        """Return the mapping of parameters to transformers' ModernBERT."""
        return hf.counterpart(self.shape(vocabulary))

    def build_model(self, vocabulary: Vocabulary, seq_len: int) -> ModernBertModel:
        """Return an unsharded model on the current device, initialised from torch's generator."""
        # Imported here: it loads torch's compiler, which takes a second and drivers do not need.
        from elastrata_workloads.modernbert.model import ModernBertModel

        return ModernBertModel(self.shape(vocabulary))

    def collate(self, rows: Rows, vocabulary: Vocabulary, seed: int) -> UnpaddedBatch:
        """Return a masked micro-batch; the masks depend only on seed, epoch and sample."""
        return mask_rows(
            rows,
            vocabulary,
            seed,
            self.masking,
            dropout=self.attention_dropout > 0,
            terms=loss_terms(self.predicts, self.z_loss),
        )

    @property
    @override
    def exported_as(self) -> TransformersNames:
        """The names by which transformers loads an export."""
        return TransformersNames(loader="AutoModelForMaskedLM", task="fill-mask")

    def export(
        self,
        state: Mapping[str, Tensor],
        vocabulary: Vocabulary,
        seq_len: int,
        tokenizer: Path | None,
        path: Path,
        form: WeightForm = AS_TRAINED,
    ) -> None:
        """Write a folder that transformers' `ModernBertForMaskedLM.from_pretrained` can load."""
        # Imported here: training does not need safetensors.
        from elastrata_workloads.modernbert.hf import export

        export(self.shape(vocabulary), state, tokenizer, path, form)

    def model_spec(self, vocabulary: Vocabulary, seq_len: int) -> ModelSpec:
        """Return the quantities that determine memory, time and FLOPs."""
        return self.shape(vocabulary).model_spec(seq_len, self.mask_probability)

    def shape(self, vocabulary: Vocabulary) -> ModernBertShape:
        """Return the model's shape for this vocabulary."""
        size = self.num_ids(vocabulary)
        return ModernBertShape(
            **self.same_in(ModernBertShape),
            num_ids=size,
            num_embeddings=self.num_rows(size),
            pad_id=vocabulary.pad_id,
        )

    @property
    @override
    def longest(self) -> int:
        return self.max_positions

    @property
    @override
    def inner_size(self) -> int:
        """Width of the feed-forward."""
        return self.intermediate_size or 3 * self.hidden_size // 2
