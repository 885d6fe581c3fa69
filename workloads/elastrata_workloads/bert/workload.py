"""The BERT workload: recipe keys and the engine's interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from elastrata.workload.batch import Batch
from elastrata.workload.hf_folder import AS_TRAINED, WeightForm
from elastrata.workload.hf_mapping import Counterpart
from elastrata.workload.model_spec import ModelSpec
from elastrata.workload.workload import Loss, TransformersNames
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_workloads.bert import hf
from elastrata_workloads.bert.objective import BertBatch, Objective, loss
from elastrata_workloads.bert.shape import Activation, BertShape
from elastrata_workloads.unpadded.masked_lm import MaskedTransformer
from elastrata_workloads.unpadded.workload import Small, has_frame

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from elastrata_workloads.bert.model import BertModel


class Bert(MaskedTransformer):
    """Bidirectional encoder with masked-language-model pre-training (Devlin et al. 2019).

    The defaults are BERT-base.
    """

    name: Literal["bert"] = "bert"
    """BERT."""
    max_positions: Annotated[int, Field(gt=0, le=2**24)] = 512
    """Maximum sample length, in tokens: rows of the position table."""
    layer_norm_eps: Small = 1e-12
    """Number added to variances before the square root."""
    activation: Activation = "gelu"
    """Activation of the feed-forward and of the head. gelu_tanh: GPT-2's approximation."""
    qk_norm: bool = False
    """Whether to apply a LayerNorm to every head's queries and keys, which keeps attention's logits
    small at large learning rates (Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv
    2302.05442). transformers has no such BERT, so its export is refused."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of zeroing a hidden activation (embeddings and residual branches, never attention
    weights). 0: one pass over much text does not overfit."""
    initializer_range: Small = 0.02
    """Standard deviation of the initial weights."""
    next_sentence: bool = False
    """Whether to also predict if the second sentence followed the first. Needs sentence pairs."""

    def architecture(self) -> dict[str, Any]:
        """Return the keys that define the architecture, without objective, initialisation and
        kernels."""
        keys = ("hidden_size", "num_layers", "num_heads", "max_positions", "layer_norm_eps")
        return {
            **{key: getattr(self, key) for key in (*keys, "activation", "qk_norm")},
            "intermediate_size": self.inner_size,
        }

    @classmethod
    def settings_of(cls, config: Any) -> dict[str, Any] | None:
        """Return the workload's settings for a BERT of transformers, or None for another model.

        Raises:
            UserError: the configuration has a part that this encoder lacks.
        """
        if config.model_type != "bert":
            return None
        if missing_parts := hf.find_unsupported(config):
            raise UserError(f"workload bert has no {', '.join(missing_parts)}")
        return hf.from_config(config)

    def counterpart(self, vocabulary: Vocabulary) -> Counterpart:
        """Return the mapping of parameters to transformers' BERT."""
        return hf.counterpart(next_sentence=self.next_sentence)

    @override
    def problems(self, manifest: Manifest) -> list[str]:
        """Return one line per reason why BERT cannot train on this data set."""
        lines = super().problems(manifest)
        if self.next_sentence and not manifest.pairs:
            lines.append(
                "workload.next_sentence: true, but this data set has no sentence pairs; "
                "prepare it with pairs or set next_sentence to false"
            )
        return lines

    @override
    def advice(self, manifest: Manifest) -> list[str]:
        """Return a line if the tokenizer is one for GPT, and one if samples are cut as for GPT."""
        lines = []
        if not has_frame(manifest.vocabulary):
            lines.append(
                "its tokenizer has no [CLS] and [SEP], as for a gpt: a bert would learn without "
                "them; prepare with tokenizer.train: wordpiece, or --tokenizer wordpiece"
            )
        if manifest.packing == "concat":
            lines.append(
                "packing: concat cuts its documents anywhere, as for a gpt: a bert's samples begin "
                "with documents; prepare with packing: none or best_fit"
            )
        return lines

    def build_model(self, vocabulary: Vocabulary, seq_len: int) -> BertModel:
        """Return an unsharded model on the current device, initialised from torch's generator."""
        # Imported here: it loads torch's compiler, which takes a second and drivers do not need.
        from elastrata_workloads.bert.model import BertModel

        return BertModel(self.shape(vocabulary))

    @override
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the transformer blocks, first to last."""
        from elastrata_workloads.bert import parallel

        return parallel.blocks(model)

    @override
    def tensor_parallel(self, model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
        """Shard heads, feed-forwards and, if its rows divide evenly, the vocabulary.

        `embedding_multiple` can make the rows divide evenly.
        """
        from elastrata_workloads.bert import parallel

        parallel.tensor_parallel(model, mesh, sequence=sequence)

    @override
    def stage(self, model: nn.Module, blocks: Sequence[int]) -> nn.Module:
        """Return the part of a model with these blocks.

        The last stage also has the table of word embeddings, under the same name.
        """
        from elastrata_workloads.bert import parallel

        return parallel.stage(model, blocks)

    def collate(self, rows: Rows, vocabulary: Vocabulary, seed: int) -> BertBatch:
        """Return a masked micro-batch; the masks depend only on seed, epoch and sample."""
        objective = Objective(
            masking=self.masking,
            next_sentence=self.next_sentence,
            dropout=self.dropout > 0,
            z_loss=self.z_loss > 0,
        )
        return objective.collate(rows, vocabulary, seed)

    @override
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return sums over predictions: `mlm`, and `nsp` with next-sentence prediction."""
        if not isinstance(batch, BertBatch):
            raise TypeError(f"expected a BertBatch, got {type(batch).__name__}")
        logits, next_logits = model(batch)
        return loss(logits, next_logits, batch, self.z_loss)

    @override
    def metrics(self) -> list[str]:
        """Return the names of loss and accuracy of masked tokens and next sentences."""
        next_sentence = ["nsp_loss", "nsp_accuracy"] if self.next_sentence else []
        return [*super().metrics(), *next_sentence]

    @property
    def exported_as(self) -> TransformersNames:
        """The names by which transformers loads an export, with one head or both."""
        loader = "BertForPreTraining" if self.next_sentence else "AutoModelForMaskedLM"
        return TransformersNames(loader=loader, task="fill-mask")

    def export(
        self,
        state: Mapping[str, Tensor],
        vocabulary: Vocabulary,
        seq_len: int,
        tokenizer: Path | None,
        path: Path,
        form: WeightForm = AS_TRAINED,
    ) -> None:
        """Write a folder that transformers can load."""
        # Imported here: training does not need safetensors.
        from elastrata_workloads.bert.hf import export

        export(self.shape(vocabulary), state, tokenizer, path, form)

    def model_spec(self, vocabulary: Vocabulary, seq_len: int) -> ModelSpec:
        """Return the quantities that determine memory, time and FLOPs."""
        return self.shape(vocabulary).model_spec(seq_len, self.mask_probability)

    def shape(self, vocabulary: Vocabulary) -> BertShape:
        """Return the model's shape for this vocabulary."""
        size = self.num_ids(vocabulary)
        return BertShape(
            **self.same_in(BertShape),
            num_ids=size,
            num_embeddings=self.num_rows(size),
            pad_id=vocabulary.pad_id,
        )

    @property
    @override
    def longest(self) -> int:
        return self.max_positions
