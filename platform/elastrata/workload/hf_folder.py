"""Weight files: a model's tensors in the safetensors layout of transformers.

One file, or several with an index.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from elastrata_pipelines.errors import UserError, suggest_nearest

_STEM = "model"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(rf"(\d{{1,9}}(?:\.\d{{1,9}})?) ?({'|'.join(_UNITS)})")
INDEX = f"{_STEM}.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class WeightForm:
    """Format of the written weights."""

    dtype: torch.dtype = torch.float32
    """Type of all floating-point tensors."""
    shard_bytes: int = 5 * 10**9
    """Largest size of a file's tensors. A larger tensor gets a separate file."""

    @property
    def dtype_name(self) -> str:
        """Name of the type in configurations of transformers, such as `float32`."""
        return str(self.dtype).removeprefix("torch.")


def weight_form(dtype: str, shard_size: str) -> WeightForm:
    """Parse a command's options `--dtype` and `--shard-size`.

    Args:
        dtype: fp32, bf16 or fp16.
        shard_size: a number with a unit, such as 5GB (10^9 bytes) or 5GiB (2^30).

    Raises:
        UserError: an option is invalid; one line each.
    """
    problems = []
    if dtype not in _DTYPES:
        known = f"expected {', '.join(_DTYPES)}{suggest_nearest(dtype, _DTYPES)}"
        problems.append(f"--dtype: {dtype}: {known}")
    match = _SIZE.fullmatch(shard_size)
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        problems.append(
            f"--shard-size: {shard_size}: expected a number above 0 with one of the units "
            f"{', '.join(_UNITS)}, such as 5GB"
        )
    if problems:
        raise UserError(*problems)
    return WeightForm(dtype=_DTYPES[dtype], shard_bytes=size)


AS_TRAINED = WeightForm()
"""In fp32, the engine's own type."""


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], form: WeightForm) -> None:
    """Write `model.safetensors`, or `model-00001-of-00003.safetensors`... with an index.

    Args:
        folder: target folder.
        weights: unique names and tensors. Tensors that share memory are written twice.
        form: format of the weights.
    """
    shards, total_bytes, num_numbers = _Shards(folder), 0, 0
    # One by one: apart from the tensors of the current file, only one tensor need be in memory.
    for name, value in weights:
        tensor = _prepare(value, form.dtype)
        if shards.bytes and shards.bytes + tensor.nbytes > form.shard_bytes:
            shards.end()
        shards.add(name, tensor)
        total_bytes, num_numbers = total_bytes + tensor.nbytes, num_numbers + tensor.numel()
    shards.end()
    files = shards.rename()
    if len(set(files.values())) > 1:
        # The index's keys are those that transformers writes.
        metadata = {"total_parameters": num_numbers, "total_size": total_bytes}
        index = {"metadata": metadata, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def num_numbers(folder: Path) -> int:
    """Return the number of elements in a folder's weight files, read from their headers."""
    from safetensors import safe_open

    count = 0
    for path in folder.glob(f"{_STEM}*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return count


class _Shards:
    """Writes consecutive files, and renames them once their number is known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._filling: dict[str, Tensor] = {}
        self._written: list[list[str]] = []
        self.bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self._filling[name] = tensor
        self.bytes += tensor.nbytes

    def end(self) -> None:
        """Write the current file and free its tensors."""
        if self._filling or not self._written:
            # Imported here: training does not need safetensors.
            from safetensors.torch import save_file

            path = self._folder / f"{_STEM}-{len(self._written)}.safetensors"
            save_file(self._filling, path, metadata={"format": "pt"})
            self._written.append(list(self._filling))
        self._filling, self.bytes = {}, 0

    def rename(self) -> dict[str, str]:
        """Give the files their final names, and return the file of every tensor."""
        count, files = len(self._written), dict[str, str]()
        for number, names in enumerate(self._written):
            # Names include the number of files, which is only known in the end.
            part = f"-{number + 1:05d}-of-{count:05d}" if count > 1 else ""
            file = f"{_STEM}{part}.safetensors"
            (self._folder / f"{_STEM}-{number}.safetensors").rename(self._folder / file)
            files |= dict.fromkeys(names, file)
        return files


def _prepare(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the written type, contiguous, with a storage that has no other
    elements."""
    value = value.detach()
    value = value.to(dtype) if value.is_floating_point() else value
    # safetensors refuses tensors that share a storage.
    is_part = value.untyped_storage().nbytes() != value.nbytes
    return value.contiguous().clone() if is_part else value.contiguous()
