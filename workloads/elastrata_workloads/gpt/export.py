"""A trained GPT as a folder that transformers loads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from elastrata_workloads.gpt import gpt2
from elastrata_workloads.gpt.families import family_of
from elastrata_workloads.gpt.shape import GptShape

_ROWS_PER_ID = ("embeddings.tokens.weight", "head.weight")


def export(
    shape: GptShape, state: Mapping[str, Tensor], tokenizer: Path | None, path: Path
) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files.

    A tied head is not in the file: transformers ties it to the token embedding, as this model does.

    Args:
        shape: the model's shape.
        state: the model's full state dict.
        tokenizer: folder with the tokenizer's files, copied in; None: no tokenizer.
        path: the folder to write; made where it is missing.

    Raises:
        UserError: transformers has no model of that shape.
    """
    family = family_of(shape)
    # Imported here: it takes seconds, and workers never export.
    from transformers import AutoTokenizer, GPT2Config, LlamaConfig

    path.mkdir(parents=True, exist_ok=True)
    special: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id"))
    if tokenizer is not None:
        shutil.copytree(tokenizer, path, dirs_exist_ok=True)
        loaded = AutoTokenizer.from_pretrained(tokenizer)
        special = {name: getattr(loaded, name) for name in special}
    make_config: Any = GPT2Config if family is gpt2 else LlamaConfig
    make_config(
        architectures=[family.ARCHITECTURE], dtype="float32", **special, **family.to_config(shape)
    ).save_pretrained(path)
    ids_only = {
        name: (value[: shape.num_ids] if name in _ROWS_PER_ID else value).detach().float()
        for name, value in state.items()
    }
    weights = {
        name: value.contiguous()
        for name, value in family.counterpart(shape).to_theirs(ids_only).items()
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
