"""The workload: Elastrata's interface to a language model of LSTMs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from elastrata.workload.batch import Batch, pad
from elastrata.workload.hf_folder import AS_TRAINED, WeightForm, write_weights
from elastrata.workload.workload import Loss, Metric, Workload
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.rows import Rows


@dataclass(frozen=True, kw_only=True)
class LstmBatch(Batch):
    """N samples of L tokens, padding included."""

    ids: Tensor
    """Shape [N, L], int64."""
    targets: Tensor
    """Shape [N (L - 1)]: the next id, or -100 for padding, which cross-entropy ignores."""


class LstmModel(nn.Module):
    """A language model: token embedding, LSTMs and head."""

    def __init__(self, num_ids: int, size: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_ids, size)
        self.layers = nn.ModuleList(nn.LSTM(size, size, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(size, num_ids)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of shape [N, L, V] for ids of shape [N, L]."""
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return self.head(hidden)


class Lstm(Workload):
    """LSTMs (Hochreiter and Schmidhuber 1997) with residual connections that predict tokens."""

    name: Literal["lstm"] = "lstm"
    hidden_size: int = 64
    """Width of the model."""
    num_layers: int = 2
    """Number of LSTMs."""

    def build_model(self, vocabulary: Vocabulary, seq_len: int) -> LstmModel:
        """Return a plain model on the current device."""
        return LstmModel(vocabulary.size, self.hidden_size, self.num_layers)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the units of sharding."""
        return list(model.get_submodule("layers").children())

    def collate(self, rows: Rows, vocabulary: Vocabulary, seed: int) -> LstmBatch:
        """Return a micro-batch, which may have no samples."""
        batch = pad(rows, vocabulary.pad_id)
        ids, is_predicted = batch.tokens, batch.is_real[:, 1:]
        targets = ids[:, 1:].where(is_predicted, -100).flatten()
        weights = {"lm": float(is_predicted.sum())}
        return LstmBatch(weights=weights, num_positions=ids.numel(), ids=ids, targets=targets)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return sums, which the engine divides by the number of predictions of the batch."""
        assert isinstance(batch, LstmBatch)
        logits = model(batch.ids)[:, :-1].float().flatten(0, 1)
        total = nn.functional.cross_entropy(logits, batch.targets, reduction="sum")
        right = (logits.argmax(-1) == batch.targets).sum()
        return Loss({"lm": total}, {"lm_accuracy": Metric(right, per="lm")})

    def metrics(self) -> Sequence[str]:
        """Return the names of the metrics in `loss`."""
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
        """Write weights, sizes and tokenizer, in a format that only Elastrata reads."""
        path.mkdir(parents=True, exist_ok=True)
        if tokenizer is not None:
            shutil.copytree(tokenizer, path, dirs_exist_ok=True)
        sizes = {"model_type": self.name, **self.model_dump(), "vocab_size": vocabulary.size}
        (path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
        write_weights(path, state.items(), form)
