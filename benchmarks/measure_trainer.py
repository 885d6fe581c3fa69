"""One process of benchmarks/trainers.py: trains with one of the rivals.

    python benchmarks/measure_trainer.py TRAINER VARIANT FOLDER SETTINGS

Prints one JSON object as its last line: the real tokens of every step, the positions of each of its
samples, and when it ended.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

THREADS = "1"

os.environ |= {"OMP_NUM_THREADS": THREADS, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from data_loaders.samples import Samples  # noqa: E402
from rival_trainers.task import SampleList, Settings, Task  # noqa: E402


def main() -> None:
    trainer, variant, folder, settings = sys.argv[1:]
    module: Any = import_module(f"rival_trainers.{trainer}")
    task = Task(
        samples=SampleList(Samples(Path(folder) / "memmap")),
        model_folder=Path(folder) / "model",
        settings=Settings(**json.loads(settings)),
    )
    module.VARIANTS[variant](task)
    print(json.dumps(asdict(task.meter)), flush=True)


if __name__ == "__main__":
    main()
