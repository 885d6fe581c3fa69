"""Models of transformers that go on with new text: the held-out loss before and after.

    python benchmarks/continued.py ../shared/data/wikitext --scratch continued

A GPT-2 and a BERT learn from the sources of this Python's library and leave as folders that
transformers loads. A run begins with each (`begin_with`) and goes on with WikiText; beside it
another one has the same recipe and draws its weights. Held out is WikiText's validation text. One
process, one thread, no Ray.

Runs that are in the scratch folder are not trained again. Writes `results/continued.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import known_result, parser_of, write_result
from texts import prepare, wikitext_source

from elastrata.core.mesh import lone_group
from elastrata.launch.quickstart import collect_corpus
from elastrata.recipe.file import load_recipe
from elastrata.run import history
from elastrata.run.export import export
from elastrata.sweeps.trial import LoneTrial
from elastrata_pipelines.storage import Storage

MODELS = {"GPT-2": "gpt/tiny", "BERT": "bert/tiny"}
VOCABULARY = 4096
BATCH_SIZE, SAMPLES = 16, 512
"""Samples of 128 tokens: of a step, and of an evaluation."""


def figures_of(recipe: str, wikitext: Path, scratch: Path, steps: int) -> dict[str, Any]:
    """The losses of a model, in nats: before, after, and of a run with drawn weights."""
    scratch.mkdir(parents=True, exist_ok=True)
    python = {"name": "python", "paths": str(collect_corpus(scratch / "python").folder)}
    old = {
        "sources": [{**python, "documents": "file"}],
        "tokenizer": {"vocab_size": VOCABULARY},
        "held_out": 0.02,
    }
    first = trained("first", recipe, old, scratch, steps)
    if not (theirs := scratch / "theirs").exists():
        export(str(first), theirs)
    new = {
        "sources": [wikitext_source(wikitext, "train")],
        "tokenizer": {"load": str(theirs)},
        "held_out": [wikitext_source(wikitext, "validation")],
    }
    begun = losses(trained("begun", recipe, new, scratch, steps, begin_with=str(theirs)))
    drawn = losses(trained("drawn", recipe, new, scratch, steps))
    return {
        "steps": steps,
        "before": round(begun[0], 3),
        "after": round(begun[steps], 3),
        "drawn weights, after as many steps": round(drawn[steps], 3),
    }


def trained(
    name: str, recipe: str, text: dict[str, Any], scratch: Path, steps: int, **more: str
) -> Path:
    """The folder of a run, which is trained unless it is there."""
    run = scratch / "runs" / name
    data = {"path": str(scratch / ("data-old" if name == "first" else "data-new")), "prepare": text}
    values = {
        "extends": recipe,
        "data": data,
        "steps": steps,
        "batch_size": BATCH_SIZE,
        "evaluation": {"every": steps, "samples": SAMPLES},
        "checkpoint": {"every": steps},
        "workers": {"threads": 1},
        **more,
    }
    prepare(scratch / f"{name}.yaml", values)
    if not run.exists() or steps not in losses(run):
        with lone_group(torch.device("cpu")):
            trial = LoneTrial(load_recipe(str(scratch / f"{name}.yaml")), Storage(str(run)))
            while trial.report().state == "running":
                pass
            trial.close()
    return run


def losses(run: Path) -> dict[int, float]:
    """The held-out loss by step."""
    entries = history.read(Storage(str(run)).sub("history"))
    told = history.surviving_evaluations(entries)
    return {int(entry["step"]): float(entry["eval/loss"]) for entry in told}


def main() -> None:
    parser = parser_of(__doc__, wikitext=True)
    parser.add_argument("--scratch", type=Path, required=True, help="keeps data and runs")
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    arguments = parser.parse_args()
    models = known_result("continued").get("models", {})
    for name, recipe in MODELS.items():
        scratch = arguments.scratch / name
        models[name] = figures_of(recipe, arguments.wikitext, scratch, arguments.steps)
        write_result("continued", {"models": models}, ("elastrata", "torch", "transformers"))


if __name__ == "__main__":
    main()
