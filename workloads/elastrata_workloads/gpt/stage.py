"""A part of a GPT: a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from elastrata_workloads.gpt.batch import GptBatch
from elastrata_workloads.gpt.model import GptModel, logits
from elastrata_workloads.unpadded.dropout import layer_keys


class GptStage(nn.Module):
    """Some blocks of a model under the names they have there; with the embeddings where the first
    is among them, with norm and head where the last one is.

    A head that is the token embedding has that table with it.

    Args:
        model: whose modules it takes.
        blocks: numbers from 0.
    """

    def __init__(self, model: GptModel, blocks: Sequence[int]) -> None:
        super().__init__()
        self.shape = model.shape
        self.is_first, self.is_last = 0 in blocks, len(model.blocks) - 1 in blocks
        if self.is_first:
            self.embeddings: nn.Module = model.embeddings
        elif self.is_last and self.shape.tied_embeddings:
            self.embeddings = nn.ModuleDict({"tokens": model.embeddings.tokens})
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in blocks})
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, batch: GptBatch, hidden: Tensor | None = None) -> Tensor:
        """Hidden states of shape [T, E] from those of the stage before, which the first stage does
        without; logits as `GptModel` with the last block."""
        if hidden is None:
            hidden = self.embeddings(batch.input_ids, batch.positions, batch.dropout_keys)
        segments = batch.segments
        for number, block in self.blocks.items():
            keys = layer_keys(batch.dropout_keys, int(number))
            hidden = block(hidden, segments, batch.positions, keys)
        return logits(self, hidden, batch) if self.is_last else hidden
