"""A file of masks: one bit for every weight, set if it is held at zero.

The format is safetensors. For every layer it has the mask, row by row and packed into bytes. The
metadata has `format`, `shapes` (the layers' rows and columns in JSON) and `checksum`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastrata_pipelines.checked_json import make_printable, parse_json, read_bytes
from elastrata_pipelines.errors import UserError, suggest_nearest
from elastrata_pipelines.storage import Storage

MASKS_FILE = "masks.safetensors"
"""Name of the file in an export."""
_FORMAT = "elastrata masks 2"
_LENGTH_BYTES = 8
_MOST_BYTES = 2**36
"""Larger than any model's masks, with eight weights a byte."""
Shape = tuple[int, int]


def pack_masks(masks: Mapping[str, Tensor]) -> bytes:
    """Return the content of a file.

    Args:
        masks: whole masks by layer, shape [m, n]; true if a weight is held at zero.
    """
    # Imported here: training does not need safetensors.
    from safetensors.torch import save

    packed = {name: torch.from_numpy(np.packbits(mask.numpy())) for name, mask in masks.items()}
    shapes = {name: (mask.shape[0], mask.shape[1]) for name, mask in masks.items()}
    metadata = {
        "format": _FORMAT,
        "shapes": json.dumps(shapes),
        "checksum": _checksum(packed, shapes),
    }
    return save(packed, metadata)


def read_masks(path: str, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Return the whole masks of a file, for the layers that it has.

    Raises:
        UserError: the file is missing, is not a file of masks, or belongs to another model.
    """
    data = _read(path)
    try:
        packed, layer_shapes = _parse(data)
    # Torch, safetensors and JSON raise exceptions of many types for invalid bytes.
    except Exception:
        raise UserError(
            f"sparsity.masks: {path}: not a file of masks, or damaged; expected one "
            f"written by `elastrata export` as {MASKS_FILE}"
        ) from None
    for layer, shape in layer_shapes.items():
        if layer not in shapes:
            raise UserError(
                f"sparsity.masks: {path}: of another model: it has a mask for "
                f"{make_printable(layer)}, which this one lacks{suggest_nearest(layer, shapes)}"
            )
        if shape != shapes[layer]:
            raise UserError(
                f"sparsity.masks: {path}: of another model: its {layer} has the shape "
                f"{list(shape)}, expected {list(shapes[layer])}"
            )
    return {name: _unpack(packed[name], shape) for name, shape in layer_shapes.items()}


def _read(path: str) -> bytes:
    folder, slash, name = path.rpartition("/")
    try:
        # Limited, as the path may name any file or URL.
        return read_bytes(Storage(folder or slash or "."), name, most=_MOST_BYTES)
    except FileNotFoundError:
        raise UserError(f"sparsity.masks: {path}: no such file") from None
    except UserError as error:
        raise UserError(f"sparsity.masks: {error}") from None


def _parse(data: bytes) -> tuple[dict[str, Tensor], dict[str, Shape]]:
    """Return the packed masks of a file and their shapes by layer.

    Raises:
        Exception: the bytes are not a file of masks.
    """
    from safetensors.torch import load

    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = parse_json(data[_LENGTH_BYTES : _LENGTH_BYTES + length], "header")
    metadata = header["__metadata__"]
    shapes = {
        name: _shape(shape) for name, shape in parse_json(metadata["shapes"], "shapes").items()
    }
    packed = load(data)
    if packed.keys() != shapes.keys():
        raise ValueError("masks and shapes of different layers")
    for name, (rows, columns) in shapes.items():
        mask = packed[name]
        # Shapes come from the file, too: a wrong one must not read beyond the mask.
        if mask.dtype != torch.uint8 or mask.shape != (-(-rows * columns // 8),):
            raise ValueError(f"{name}: not a bit for each of {rows} x {columns} weights")
    if (metadata["format"], metadata["checksum"]) != (_FORMAT, _checksum(packed, shapes)):
        raise ValueError("altered, or of an unknown format")
    return packed, shapes


def _shape(shape: Any) -> Shape:
    rows, columns = shape
    if type(rows) is not int or type(columns) is not int or rows < 1 or columns < 1:
        raise ValueError(f"{shape}: expected rows and columns")
    return rows, columns


def _checksum(packed: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> str:
    """Return SHA-256 over names, shapes and masks of all layers, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(packed):
        digest.update(json.dumps([name, *shapes[name]]).encode())
        digest.update(packed[name].numpy().tobytes())
    return digest.hexdigest()


def _unpack(packed: Tensor, shape: Shape) -> Tensor:
    bits = np.unpackbits(packed.numpy(), count=shape[0] * shape[1])
    return torch.from_numpy(bits.astype(np.bool_)).view(*shape)
