"""A trained ModernBERT as a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from elastrata.core.weight_files import WeightForm
from elastrata_workloads.modernbert.shape import ModernBertShape
from elastrata_workloads.modernbert.transformers_modernbert import counterpart, to_config
from elastrata_workloads.unpadded.export import write_folder
from elastrata_workloads.unpadded.id_rows import IdRows

_ROWS_PER_ID = ("embeddings.tokens.weight", "head.bias")
_SPECIAL = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")


def export(
    shape: ModernBertShape,
    state: Mapping[str, Tensor],
    tokenizer: Path | None,
    path: Path,
    form: WeightForm,
) -> None:
    """Writes config.json, the weights and the tokenizer's files. The decoder's weight is not in the
    file: transformers ties it to the token embedding, as this model does.

    Args:
        shape: the model's shape.
        state: the model's full state dict; each tensor is asked for once.
        tokenizer: folder with the tokenizer's files, copied in; None: no tokenizer.
        path: the folder to write; made where it is missing.
        form: of the weights.
    """
    # Imported here: it takes seconds, and workers never export.
    from transformers import AutoTokenizer, ModernBertConfig

    special: dict[str, Any] = dict.fromkeys(_SPECIAL)
    if tokenizer is not None:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
        special = {name: getattr(loaded, name) for name in special}
    make_config: Any = ModernBertConfig
    config = make_config(
        architectures=["ModernBertForMaskedLM"],
        dtype=form.dtype_name,
        **special,
        **to_config(shape),
    )
    weights = counterpart(shape).to_theirs(IdRows(state, _ROWS_PER_ID, shape.num_ids))
    write_folder(path, [config], weights, tokenizer, form)
