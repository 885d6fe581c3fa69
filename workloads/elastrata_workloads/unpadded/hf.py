"""Models in the format of transformers: tables of parameter names, and the folder."""

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


def in_blocks(
    num_layers: int, ours: str, theirs: str, modules: Mapping[str, Origin]
) -> dict[str, Origin]:
    """Rows for the modules of every block, from those of one."""
    return {
        f"{ours}.{layer}.{name}": replace(origin, name=f"{theirs}.{layer}.{origin.name}")
        for layer in range(num_layers)
        for name, origin in modules.items()
    }


def of_parameters(modules: Mapping[str, Origin]) -> dict[str, Origin]:
    """The weight and the bias that every module may have. A bias is never transposed."""
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
    """A state dict whose tables of the vocabulary end with the last id. Tensors are taken from the
    whole one when they are asked for, so that one that reads them is read but once each."""

    state: Mapping[str, Tensor]
    tables: Collection[str]
    """Names of the tensors with a row for every id."""
    num_ids: int

    @override
    def __getitem__(self, name: str) -> Tensor:
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
    """Writes config.json, the weights and the tokenizer's files.

    Args:
        config_class: transformers' class of the configuration.
        architecture: transformers' class of the model.
        values: of the configuration.
        weights: names and tensors of transformers' state dict; each is asked for once. Tied ones
            may be left out: transformers ties them again.
        tokenizer: folder with the tokenizer's files, copied in; None: no tokenizer.
        path: the folder to write; made where it is missing.
        form: of the weights.
        special: names of ids that the configuration takes from the tokenizer.
        generates: whether the model writes text: generation_config.json is written, too.
    """
    # Imported here: it takes seconds, and workers never export.
    import transformers
    from transformers import AutoTokenizer, GenerationConfig

    ids: dict[str, Any] = dict.fromkeys(special)
    path.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        loaded = AutoTokenizer.from_pretrained(tokenizer) if special else None
        ids = {name: getattr(loaded, name) for name in special}
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
