"""A mixture at read time compared with the same mixture prepared as one data set.

    python benchmarks/mixture_baked.py ../shared/data/wikitext --scratch mixture --seeds 5

The text is that of `mixture_text.py`. In the baked variant, `prepare` makes one data set of all
three sources, packed and shuffled together. In the read variant, three data sets are mixed at read
time, in the baked one's shares of tokens. With each seed, both variants have the same initial
weights, model, steps and batch size, and read each of the same samples at most once. Both are
evaluated on the same held-out data of each source. Runs in one process with one thread.

Finished runs in the scratch folder are not repeated: the same command resumes after an
interruption. Writes `results/mixture_baked.json` for the seeds that are complete.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import elastrata, parser_of, three_sources, trained_alone, write_result
from mixture_text import RECIPE, prepared_sources

from elastrata.recipe.file import load_recipe
from elastrata.run import history
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.storage import Storage

WAYS = ("read", "baked")
STEPS, EVERY, SAMPLES = 400, 200, 192
"""Steps of a run; steps between evaluations; samples of each source in an evaluation."""
SMALLER = ("workload.num_layers=2", "batch_size=8")
"""Overrides that make the model small enough for ten runs."""
LOSSES = {"wikitext": "eval/loss", "python": "eval/code/loss", "docs": "eval/pages/loss"}
"""Name of the held-out loss of each source."""


def prepared_baked(changes: Sequence[str], texts: Mapping[str, str], scratch: Path) -> Manifest:
    """Prepare one data set of all sources if it is missing; return its manifest."""
    baked = scratch / "baked"
    if not (baked / "manifest.json").exists():
        prepare = load_recipe(RECIPE, changes).data.prepare
        assert prepare is not None
        values = prepare.model_dump(mode="json", exclude_unset=True)
        # Both variants must have the same tokenizer, or their losses could not be compared.
        values["tokenizer"] = {"load": str(scratch / "mix" / "wikitext" / "tokenizer")}
        elastrata(
            "prepare", "gpt/quick", f"data.prepare={json.dumps(values)}", f"data.path={baked}"
        )
    return Manifest.read(Storage(str(baked)))


def check_alike(baked: Manifest, sources: Mapping[str, Manifest]) -> None:
    """Check that the baked data set has as many documents of each source as the separate ones.

    Raises:
        UserError: it does not.
    """
    for entry in baked.sources:
        (alone,) = sources[entry.name].sources
        if entry.documents != alone.documents:
            raise UserError(f"{entry['name']}: {entry['documents']}, alone {alone['documents']}")


def recipe_changes(seed: int, scratch: Path) -> list[str]:
    """Return the overrides that both variants share."""
    data = scratch / "mix"
    sets = [
        {"name": name, "path": str(data / source / "held_out")}
        for name, source in (("code", "python"), ("pages", "docs"))
    ]
    evaluation = {
        "path": str(data / "wikitext" / "held_out"),
        "every": EVERY,
        "samples": SAMPLES,
        "sets": sets,
    }
    return [
        *SMALLER,
        # A single stage: the shares of a baked data set cannot change.
        "phases=[]",
        "data.prepare=null",
        f"steps={STEPS}",
        f"seed={seed}",
        f"evaluation={json.dumps(evaluation)}",
    ]


def way_changes(way: str, baked: Manifest, scratch: Path) -> list[str]:
    """Return the overrides for a variant's data and shares."""
    if way == "baked":
        return [f"data.path={scratch / 'baked'}", "data.sources=[]"]
    shares = [{"name": entry.name, "weight": entry.tokens} for entry in baked.sources]
    return [f"data.path={scratch / 'mix'}", f"data.sources={json.dumps(shares)}"]


def losses(run: Path) -> dict[str, Any]:
    """Return the held-out losses by step and source, their means, and the tokens of the run."""
    entries = history.read_entries(Storage(str(run)).sub("history"))
    curve = {
        int(entry["step"]): {name: float(entry[key]) for name, key in LOSSES.items()}
        for entry in history.surviving_evaluations(entries)
    }
    for losses_by_source in curve.values():
        losses_by_source["mean"] = statistics.mean(losses_by_source.values())
    return {"tokens": history.effective_steps(entries)[-1]["tokens"], "curve": curve}


def trained(way: str, seed: int, baked: Manifest, scratch: Path) -> dict[str, Any]:
    """Return the losses of a run; train it first unless it is finished."""
    overrides = [*recipe_changes(seed, scratch), *way_changes(way, baked, scratch)]
    return losses(trained_alone(load_recipe(RECIPE, overrides), scratch / "runs" / f"{way}-{seed}"))


def summary(seeds: Sequence[Mapping[str, Any]]) -> dict[int, Any]:
    """Return both variants and their differences by step and source: means, deviations, errors.

    Errors are the standard errors of the means; differences are taken seed by seed.
    """
    return {
        step: {name: _summarise_seeds(seeds, step, name) for name in (*LOSSES, "mean")}
        for step in seeds[0]["read"]["curve"]
    }


def _summarise_seeds(seeds: Sequence[Mapping[str, Any]], step: int, name: str) -> dict[str, Any]:
    read, baked = ([seed[way]["curve"][step][name] for seed in seeds] for way in WAYS)
    differences = [one - other for one, other in zip(read, baked, strict=True)]
    return {"read": _mean(read), "baked": _mean(baked), "read_less_baked": _mean(differences)}


def _mean(values: Sequence[float]) -> dict[str, float]:
    """Return the mean, and with several values their deviation and standard error."""
    figures = {"mean": statistics.mean(values)}
    if len(values) > 1:
        deviation = statistics.stdev(values)
        figures |= {"deviation": deviation, "standard_error": deviation / len(values) ** 0.5}
    return {key: round(value, 4) for key, value in figures.items()}


def main() -> None:
    parser = parser_of(__doc__, wikitext=True)
    parser.add_argument("--scratch", type=Path, required=True, help="keeps data and runs")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    scratch: Path = arguments.scratch.resolve()
    texts = three_sources(arguments.wikitext, scratch)
    changes = prepared_sources(arguments.wikitext, scratch)
    baked = prepared_baked(changes, texts, scratch)
    check_alike(
        baked, {name: Manifest.read(Storage(str(scratch / "mix" / name))) for name in texts}
    )
    seeds: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        runs = {way: trained(way, seed, baked, scratch) for way in WAYS}
        seeds.append({"seed": seed, **runs})
        figures = {
            "steps": STEPS,
            "tokens_baked_by_source": {entry.name: entry.tokens for entry in baked.sources},
            "by_step": summary(seeds),
            "seeds": seeds,
        }
        write_result("mixture_baked", figures, ("elastrata", "torch"))


if __name__ == "__main__":
    main()
