"""A file of masks: which weights of a model are held at zero, a bit for each.

A safetensors file: for every layer its mask, row by row and packed into bytes, and in the metadata
`format` and `shapes`, the layers' rows and columns in JSON. That library is imported where a file
is read or written: training does without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.storage import Storage

MASKS_FILE = "masks.safetensors"
"""What `elastrata export` calls it."""
_FORMAT = "elastrata masks 1"
_LENGTH_BYTES = 8


def packed_masks(masks: Mapping[str, Tensor]) -> bytes:
    """The content of a file.

    Args:
        masks: by layer, whole, of shape [m, n]; true where a weight is held at zero.
    """
    from safetensors.torch import save

    packed = {name: torch.from_numpy(np.packbits(mask.numpy())) for name, mask in masks.items()}
    shapes = {name: list(mask.shape) for name, mask in masks.items()}
    return save(packed, {"format": _FORMAT, "shapes": json.dumps(shapes)})


def read_masks(path: str, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """The masks of a file, by layer, whole; of the layers that it has.

    Args:
        path: of the file, or its URL.
        shapes: rows and columns of the model's layers that may be sparse.

    Raises:
        UserError: there is no such file, it is no file of masks, or it is that of another model.
    """
    from safetensors.torch import load

    folder, _, name = path.rpartition("/")
    try:
        data = Storage(folder or ".").read(name)
    except FileNotFoundError:
        raise UserError(f"sparsity.masks: {path}: no such file") from None
    found = _shapes(data, path)
    for layer, shape in found.items():
        if layer not in shapes:
            raise UserError(
                f"sparsity.masks: {path}: of another model: it has a mask for {layer}, which this "
                f"one lacks{nearest(layer, shapes)}"
            )
        if tuple(shape) != shapes[layer]:
            raise UserError(
                f"sparsity.masks: {path}: of another model: its {layer} has the shape {shape}, "
                f"expected {list(shapes[layer])}"
            )
    packed = load(data)
    return {name: _unpacked(packed[name], shape) for name, shape in found.items()}


def _shapes(data: bytes, path: str) -> dict[str, list[int]]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        header: dict[str, Any] = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
        told = header["__metadata__"]
        if told["format"] != _FORMAT:
            raise ValueError(told["format"])
        shapes: dict[str, list[int]] = json.loads(told["shapes"])
        load(data)
    except (ValueError, KeyError, TypeError, SafetensorError):
        raise UserError(
            f"sparsity.masks: {path}: no file of masks, or a damaged one: expected one that "
            f"`elastrata export` wrote as {MASKS_FILE}"
        ) from None
    return shapes


def _unpacked(packed: Tensor, shape: list[int]) -> Tensor:
    bits = np.unpackbits(packed.numpy(), count=shape[0] * shape[1])
    return torch.from_numpy(bits.astype(np.bool_)).view(*shape)
