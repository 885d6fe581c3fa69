"""A trained model as a folder that transformers loads."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from elastrata.core.weight_files import WeightForm, write_weights


def write_folder(
    path: Path,
    configs: Iterable[Any],
    weights: Iterable[tuple[str, Tensor]],
    tokenizer: Path | None,
    form: WeightForm,
) -> None:
    """Writes the configurations, the weights and the tokenizer's files.

    Args:
        path: the folder to write; made where it is missing.
        configs: of transformers: the model's, and that of its generation where it has one.
        weights: names and tensors of transformers' state dict; each is asked for once. Tied ones
            may be left out: transformers ties them again.
        tokenizer: folder with the tokenizer's files, copied in; None: no tokenizer.
        form: of the weights.
    """
    path.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        shutil.copytree(tokenizer, path, dirs_exist_ok=True)
    for config in configs:
        config.save_pretrained(path)
    write_weights(path, weights, form)
