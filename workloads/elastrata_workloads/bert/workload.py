"""BERT as the engine and its recipes know it."""

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
from elastrata.workload.workload import ExportedAs, Loss
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.rows import Rows
from elastrata_workloads.bert import hf
from elastrata_workloads.bert.objective import BertBatch, Objective, loss
from elastrata_workloads.bert.shape import BertShape
from elastrata_workloads.unpadded.masked_lm import MaskedTransformer
from elastrata_workloads.unpadded.workload import Small

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from elastrata_workloads.bert.model import BertModel


class Bert(MaskedTransformer):
    """Bidirectional encoder with masked-language-model pre-training (Devlin et al. 2019).

    The defaults are BERT-base.
    """

    name: Literal["bert"] = "bert"
    """This workload."""
    max_positions: Annotated[int, Field(gt=0, le=2**24)] = 512
    """Longest sample the model can take, in tokens: rows of the position table."""
    layer_norm_eps: Small = 1e-12
    """Added to variances before the square root."""
    qk_norm: bool = False
    """Whether every head's query and key are normalised, by a LayerNorm, before they meet: so
    attention's logits stay small at large learning rates (Henry et al. 2020, arXiv 2010.04245;
    Dehghani et al. 2023, arXiv 2302.05442). transformers has no such BERT: the export is
    refused."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of zeroing a hidden activation (embeddings and residual branches; never
    attention weights). 0 by default: one pass over much text does not overfit."""
    initializer_range: Small = 0.02
    """Standard deviation of the initial weights."""
    next_sentence: bool = False
    """Whether to predict, too, if the second sentence followed the first; needs sentence pairs."""

    def architecture(self) -> dict[str, Any]:
        """All that its objective, its initialization and its kernels do not concern."""
        keys = ("hidden_size", "num_layers", "num_heads", "max_positions", "layer_norm_eps")
        return {
            **{key: getattr(self, key) for key in (*keys, "qk_norm")},
            "intermediate_size": self.inner_size,
        }

    @classmethod
    def settings_of(cls, config: Any) -> dict[str, Any] | None:
        """The keys by which it is a BERT of transformers.

        Raises:
            UserError: that one has a part which this encoder lacks.
        """
        if config.model_type != "bert":
            return None
        if lacking := hf.unsupported(config):
            raise UserError(f"workload bert has no {', '.join(lacking)}")
        return hf.from_config(config)

    def counterpart(self, vocabulary: Vocabulary) -> Counterpart:
        """Where its parameters lie in transformers' BERT."""
        return hf.counterpart(next_sentence=self.next_sentence)

    @override
    def problems(self, manifest: Manifest) -> list[str]:
        """One line per reason why BERT cannot train on that data set; empty if it can."""
        lines = super().problems(manifest)
        if self.next_sentence and not manifest.pairs:
            lines.append(
                "workload.next_sentence: true, but this data set has no sentence pairs; "
                "prepare it with pairs or set next_sentence to false"
            )
        return lines

    def build_model(self, vocabulary: Vocabulary, seq_len: int) -> BertModel:
        """A plain, unsharded model on the current device, drawn from torch's current generator."""
        # Imported here: it brings torch's compiler along, a second that drivers can do without.
        from elastrata_workloads.bert.model import BertModel

        return BertModel(self.shape(vocabulary))

    @override
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The transformer blocks, first to last."""
        from elastrata_workloads.bert import parallel

        return parallel.blocks(model)

    @override
    def tensor_parallel(self, model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
        """Divides heads, feed-forwards, and the vocabulary where it has equally many rows for
        every rank (`embedding_multiple`)."""
        from elastrata_workloads.bert import parallel

        parallel.tensor_parallel(model, mesh, sequence=sequence)

    @override
    def stage(self, model: nn.Module, blocks: Sequence[int]) -> nn.Module:
        """The part of a model with these blocks. The heads bring the table of word embeddings
        along, under the same name."""
        from elastrata_workloads.bert import parallel

        return parallel.stage(model, blocks)

    def collate(self, rows: Rows, vocabulary: Vocabulary, seed: int) -> BertBatch:
        """A micro-batch with its masks, which depend on seed, epoch and sample alone."""
        objective = Objective(
            masking=self.masking,
            next_sentence=self.next_sentence,
            dropout=self.dropout > 0,
            z_loss=self.z_loss > 0,
        )
        return objective.collate(rows, vocabulary, seed)

    @override
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Sums over predictions: `mlm`, and `nsp` where the model predicts next sentences."""
        if not isinstance(batch, BertBatch):
            raise TypeError(f"expected a BertBatch, got {type(batch).__name__}")
        logits, next_logits = model(batch)
        return loss(logits, next_logits, batch, self.z_loss)

    @override
    def metrics(self) -> list[str]:
        """Loss and accuracy of the masked tokens, and of next sentences where it predicts them."""
        next_sentence = ["nsp_loss", "nsp_accuracy"] if self.next_sentence else []
        return [*super().metrics(), *next_sentence]

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
        from elastrata_workloads.bert.hf import export

        export(self.shape(vocabulary), state, tokenizer, path, form)

    def model_spec(self, vocabulary: Vocabulary, seq_len: int) -> ModelSpec:
        """The numbers that memory, time and FLOPs are computed from."""
        return self.shape(vocabulary).model_spec(seq_len, self.mask_probability)

    def shape(self, vocabulary: Vocabulary) -> BertShape:
        """The model's shape with that vocabulary."""
        size = vocabulary.size
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
