"""Export to the format of transformers: tables of parameter names, and the model folder."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from elastrata.workload.hf_folder import WeightForm, write_weights
from elastrata.workload.hf_mapping import Origin


def repeat_in_blocks(
    num_layers: int, ours: str, theirs: str, modules: Mapping[str, Origin]
) -> dict[str, Origin]:
    """Return the origins of all blocks' modules from those of a single block."""
    return {
        f"{ours}.{layer}.{name}": replace(origin, name=f"{theirs}.{layer}.{origin.name}")
        for layer in range(num_layers)
        for name, origin in modules.items()
    }


def parameter_origins(modules: Mapping[str, Origin]) -> dict[str, Origin]:
    """Return the origins of every module's weight and bias; a bias is never transposed."""
    return {
        f"{name}.{part}": replace(
            origin,
            name=f"{origin.name}.{part}",
            transposed=origin.transposed and part == "weight",
        )
        for name, origin in modules.items()
        for part in ("weight", "bias")
    }


@dataclass(frozen=True)
class IdRows(Mapping[str, Tensor]):
    """A state dict whose vocabulary tables are truncated to the real ids."""

    state: Mapping[str, Tensor]
    tables: Collection[str]
    """Names of the tensors with one row per id."""
    num_ids: int

    @override
    def __getitem__(self, name: str) -> Tensor:
        # Read lazily, so that a state dict that loads tensors from disk loads each only once.
        value = self.state[name].detach()
        return value[: self.num_ids] if name in self.tables else value

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    @override
    def __len__(self) -> int:
        return len(self.state)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self.state


def export(
    config_class: str,
    architecture: str,
    values: Mapping[str, Any],
    weights: Iterable[tuple[str, Tensor]],
    tokenizer: Path | None,
    path: Path,
    form: WeightForm,
    *,
    special: Sequence[str] = (),
    generates: bool = False,
) -> None:
    """Write config.json, the weights and the tokenizer's files.

    Args:
        config_class: transformers' configuration class.
        architecture: transformers' model class.
        values: configuration values.
        weights: names and tensors of transformers' state dict, iterated once. Tied tensors may be
            omitted: transformers ties them again.
        tokenizer: folder with the tokenizer's files, copied into `path`; None: no tokenizer.
        path: output folder, created if missing.
        form: format of the weights.
        special: names of special ids that the configuration takes from the tokenizer.
        generates: whether the model generates text, which adds generation_config.json.
    """
    # Imported here: it takes seconds, and workers never export.
    import transformers
    from transformers import AutoTokenizer, GenerationConfig

    ids: dict[str, Any] = dict.fromkeys(special)
    path.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        loaded_tokenizer = AutoTokenizer.from_pretrained(tokenizer) if special else None
        ids = {name: getattr(loaded_tokenizer, name) for name in special}
        shutil.copytree(tokenizer, path, dirs_exist_ok=True)
    make_config: Any = getattr(transformers, config_class)
    make_config(
        architectures=[architecture], dtype=form.dtype_name, **ids, **values
    ).save_pretrained(path)
    if generates:
        # Padding is known by its mask; text generation warns if no id is named for it.
        make_config = GenerationConfig
        make_config(**ids, pad_token_id=ids["eos_token_id"]).save_pretrained(path)
    write_weights(path, weights, form)
