"""A part of a BERT: a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from elastrata_workloads.bert.batch import BertBatch
from elastrata_workloads.bert.model import BertModel, Trunk, logits
from elastrata_workloads.unpadded.dropout import layer_keys


class BertStage(nn.Module):
    """Some blocks of a model under the names they have there; with the embeddings where the first
    is among them, with the heads where the last one is.

    The heads have the table of word embeddings with them, which is their decoder.

    Args:
        model: whose modules it takes.
        blocks: numbers from 0.
    """

    def __init__(self, model: BertModel, blocks: Sequence[int]) -> None:
        super().__init__()
        self.shape = model.shape
        self.is_last = len(model.bert.encoder.layer) - 1 in blocks
        self.bert = TrunkStage(model.bert, blocks, is_last=self.is_last)
        if self.is_last:
            self.cls = model.cls

    def forward(
        self, batch: BertBatch, hidden: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Hidden states of shape [T, E] from those of the stage before, which the first stage does
        without; logits as `BertModel` with the last block."""
        hidden = self.bert(batch, hidden)
        return logits(self, hidden, batch) if self.is_last else hidden

    @property
    def blocks(self) -> list[nn.Module]:
        """In order."""
        return list(self.bert.blocks.values())


class TrunkStage(nn.Module):
    """A stage's part of the trunk."""

    def __init__(self, trunk: Trunk, blocks: Sequence[int], *, is_last: bool) -> None:
        super().__init__()
        if 0 in blocks:
            self.embeddings: nn.Module = trunk.embeddings
        elif is_last:
            table = trunk.embeddings.word_embeddings
            self.embeddings = nn.ModuleDict({"word_embeddings": table})
        layer = nn.ModuleDict({str(number): trunk.encoder.layer[number] for number in blocks})
        self.encoder = nn.ModuleDict({"layer": layer})
        self.pooler = trunk.pooler if is_last else None

    def forward(self, batch: BertBatch, hidden: Tensor | None) -> Tensor:
        """Shape [T, E]; `hidden` is what came from the stage before."""
        if hidden is None:
            hidden = self.embeddings(
                batch.input_ids, batch.positions, batch.token_types, batch.dropout_keys
            )
        segments = batch.segments
        for number, block in self.blocks.items():
            hidden = block(hidden, segments, layer_keys(batch.dropout_keys, int(number)))
        return hidden

    @property
    def blocks(self) -> nn.ModuleDict:
        """By number."""
        return cast(nn.ModuleDict, self.encoder["layer"])
