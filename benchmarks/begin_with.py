"""The memory of beginning with weights: what a rank needs beside its shard while it reads them.

    python benchmarks/begin_with.py

A Llama of some GB in fp32, in files of 500 MB as transformers saves it, is read into the shards of
one and two ranks (gloo), under FSDP and under tensor parallelism. Every rank has its first weights
by then; the peak of its resident memory while it reads, over what it had before, is what reading
took. Writes `results/begin_with.json`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import parser_of, scratch_folder, write_result
from processes import on_ranks
from safetensors.torch import save_file

from elastrata.core.id_tables import sizes
from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import Parent
from elastrata.trainer.engine import divided_model
from elastrata.trainer.parent_weights import begin_with
from elastrata_pipelines.format import Vocabulary

IDS = 32_000
VOCABULARY = Vocabulary(size=IDS, pad_id=0, mask_id=None, special_ids=(0,), continuation_ids=())
SEQ_LEN = 128
LAYOUTS: tuple[tuple[int, dict[str, Any]], ...] = ((1, {}), (2, {}), (2, {"tensor": 2}))
FILE_BYTES = 500_000_000


def recipe_of(layers: int, parallel: Mapping[str, Any], ranks: int) -> Recipe:
    workload = {
        "name": "gpt",
        "hidden_size": 2048,
        "num_layers": layers,
        "num_heads": 16,
        "max_positions": SEQ_LEN,
        "positions": "rotary",
        "activation": "swiglu",
        "norm": "rms",
        "bias": False,
        "tied_embeddings": False,
    }
    return Recipe.model_validate(
        {
            "workload": workload,
            "data": {"path": "none"},
            "steps": 1,
            "batch_size": ranks,
            "optimizer": {"lr": 1e-3},
            "parallel": dict(parallel),
            "workers": {"min": ranks, "max": ranks},
        }
    )


def write_model(folder: Path, recipe: Recipe) -> dict[str, int]:
    """Writes its tensors file by file; their bytes in all, and those of the largest one."""
    table = recipe.workload.counterpart(VOCABULARY)
    shapes = sizes(recipe.workload, VOCABULARY, SEQ_LEN)
    theirs = {table.origin(name).name: shape for name, shape in shapes.items()}
    files: list[dict[str, torch.Tensor]] = [{}]
    weight_map, of_file, largest, total = {}, 0, 0, 0
    for name, shape in theirs.items():
        tensor = torch.rand(shape)
        if of_file and of_file + tensor.nbytes > FILE_BYTES:
            save_file(files[-1], folder / f"model-{len(files):05d}.safetensors")
            files[-1].clear()
            files, of_file = [*files, {}], 0
        files[-1][name] = tensor
        weight_map[name] = f"model-{len(files):05d}.safetensors"
        of_file += tensor.nbytes
        total, largest = total + tensor.nbytes, max(largest, tensor.nbytes)
    save_file(files[-1], folder / f"model-{len(files):05d}.safetensors")
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return {"model_bytes": total, "largest_tensor_bytes": largest}


def measure(rank: int, ranks: int, layers: int, parallel: dict[str, Any], folder: str) -> Any:
    recipe = recipe_of(layers, parallel, ranks)
    model = divided_model(recipe, VOCABULARY, SEQ_LEN, torch.device("cpu"), ranks).model
    parent = Parent(kind="folder", url=folder, sha256="0" * 64, num_ids=IDS)
    optimizer = torch.optim.AdamW(model.parameters())
    dist.barrier()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    began = time.perf_counter()
    begin_with(parent, recipe.workload, VOCABULARY, SEQ_LEN, model, optimizer)
    seconds = time.perf_counter() - began
    return {"resident": before, "beside": _resident("VmHWM") - before, "seconds": seconds}


def _resident(key: str) -> int:
    """Bytes, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(key))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--scratch", type=Path, help="where the model is written")
    arguments = parser.parse_args()
    rows = []
    with scratch_folder(arguments.scratch) as folder:
        figures = write_model(folder, recipe_of(arguments.layers, {}, 1))
        for ranks, parallel in LAYOUTS:
            found = on_ranks(ranks, measure, ranks, arguments.layers, parallel, str(folder))
            rows.append(
                {
                    "ranks": ranks,
                    "layout": parallel or "fsdp",
                    "resident_mb": round(max(one["resident"] for one in found) / 1e6),
                    "beside_the_shard_mb": round(max(one["beside"] for one in found) / 1e6, 1),
                    "seconds": round(max(one["seconds"] for one in found), 1),
                }
            )
    named = {key.replace("bytes", "mb"): round(value / 1e6) for key, value in figures.items()}
    write_result("begin_with", {**named, "rows": rows}, ("torch", "safetensors"))


if __name__ == "__main__":
    main()
