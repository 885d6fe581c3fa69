"""The workload: what Elastrata needs to know of a language model of LSTMs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from elastrata.core.batch import Batch, padded
from elastrata.core.weight_files import AS_TRAINED, WeightForm, write_weights
from elastrata.core.workload import Loss, Metric, Workload
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.rows import Rows


@dataclass(frozen=True, kw_only=True)
class LstmBatch(Batch):
    """N samples of L tokens, padding included."""

    tokens: Tensor
    """Shape [N, L], int64."""
    predicted: Tensor
    """Shape [N, L - 1], bool: where the next token is one to predict."""


class LstmModel(nn.Module):
    """Token embedding, LSTMs, head."""

    def __init__(self, num_ids: int, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_ids, hidden_size)
        self.layers = nn.ModuleList(
            nn.LSTM(hidden_size, hidden_size, batch_first=True) for _ in range(num_layers)
        )
        self.head = nn.Linear(hidden_size, num_ids)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape [N, L, V] for tokens of shape [N, L]."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        logits: Tensor = self.head(hidden)
        return logits


class Lstm(Workload):
    """LSTMs (Hochreiter and Schmidhuber 1997) with residual connections that predict tokens."""

    name: Literal["lstm"] = "lstm"
    """This workload."""
    hidden_size: int = 64
    """Width of the model."""
    num_layers: int = 2
    """Number of LSTMs."""

    def build_model(self, vocabulary: Vocabulary, seq_len: int) -> LstmModel:
        """A plain model on the current device."""
        return LstmModel(vocabulary.size, self.hidden_size, self.num_layers)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The units of sharding."""
        assert isinstance(model, LstmModel)
        return list(model.layers)

    def collate(self, rows: Rows, vocabulary: Vocabulary, seed: int) -> LstmBatch:
        """A micro-batch, maybe of no samples."""
        batch = padded(rows, vocabulary.pad_id)
        predicted = batch.is_real[:, 1:]
        return LstmBatch(
            weights={"lm": float(predicted.sum())},
            num_positions=batch.tokens.numel(),
            tokens=batch.tokens,
            predicted=predicted,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Sums over the predictions, never means: the engine divides once."""
        assert isinstance(batch, LstmBatch)
        logits, targets = model(batch.tokens)[:, :-1].float(), batch.tokens[:, 1:]
        each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        # An empty batch has nothing to predict; its zero still hangs on the weights.
        total = (each * batch.predicted).sum() + 0.0 * logits.sum()
        right = ((logits.argmax(-1) == targets) & batch.predicted).sum()
        return Loss({"lm": total}, {"lm_accuracy": Metric(right.detach(), per="lm")})

    def metrics(self) -> Sequence[str]:
        """Names of what `loss` tells."""
        return ["lm_loss", "lm_accuracy"]

    def export(
        self,
        state: Mapping[str, Tensor],
        vocabulary: Vocabulary,
        seq_len: int,
        tokenizer: Path | None,
        path: Path,
        form: WeightForm = AS_TRAINED,
    ) -> None:
        """Writes weights, sizes and tokenizer; transformers has no such model."""
        path.mkdir(parents=True, exist_ok=True)
        if tokenizer is not None:
            shutil.copytree(tokenizer, path, dirs_exist_ok=True)
        sizes = {"model_type": self.name, **self.model_dump(), "vocab_size": vocabulary.size}
        (path / "config.json").write_text(json.dumps(sizes))
        write_weights(path, state.items(), form)
