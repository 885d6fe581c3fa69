"""A trained GPT as a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from elastrata.core.weight_files import WeightForm
from elastrata_workloads.gpt.families import family_of
from elastrata_workloads.gpt.shape import GptShape
from elastrata_workloads.unpadded.export import write_folder
from elastrata_workloads.unpadded.id_rows import IdRows

_ROWS_PER_ID = ("embeddings.tokens.weight", "head.weight")
_SPECIAL = ("bos_token_id", "eos_token_id")


def export(
    shape: GptShape,
    state: Mapping[str, Tensor],
    tokenizer: Path | None,
    path: Path,
    form: WeightForm,
) -> None:
    """Writes config.json, generation_config.json, the weights and the tokenizer's files.

    A tied head is not in the file: transformers ties it to the token embedding, as this model does.

    Args:
        shape: the model's shape.
        state: the model's full state dict; each tensor is asked for once.
        tokenizer: folder with the tokenizer's files, copied in; None: no tokenizer.
        path: the folder to write; made where it is missing.
        form: of the weights.

    Raises:
        UserError: transformers has no model of that shape.
    """
    family = family_of(shape)
    # Imported here: it takes seconds, and workers never export.
    import transformers
    from transformers import AutoTokenizer, GenerationConfig

    special: dict[str, Any] = dict.fromkeys(_SPECIAL)
    if tokenizer is not None:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
        special = {name: getattr(loaded, name) for name in special}
    make_config: Any = getattr(transformers, family.CONFIG)
    config = make_config(
        architectures=[family.ARCHITECTURE],
        dtype=form.dtype_name,
        **special,
        **family.to_config(shape),
    )
    # Padding is told apart by its mask; text generation warns where no id is named for it.
    padding = {"pad_token_id": special["eos_token_id"]}
    make_config = GenerationConfig
    generation = make_config(**special, **padding)
    weights = family.counterpart(shape).to_theirs(IdRows(state, _ROWS_PER_ID, shape.num_ids))
    write_folder(path, (config, generation), weights, tokenizer, form)
