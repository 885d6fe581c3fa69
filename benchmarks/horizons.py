"""Three lengths of training from one stem, beside a cosine run for each.

    python benchmarks/horizons.py ../shared/data/wikitext --scratch horizons --models gpt --seeds 1

With `schedule.shape: wsd` the rate stays at its peak until the decay, so that runs of several
lengths have all but their decays in common: a stem is trained once, and each length is its decay
alone, from a checkpoint of the stem, as `elastrata fork` does it. The text is WikiText and the
sources of this Python's standard library. Beside it every length has a run of its own with
`shape: cosine`: the same peak, warm-up, seed and data. All are asked for the loss of WikiText's
validation text. One process, one thread, no Ray.

Runs that are in the scratch folder are not trained again: the same command goes on where it was
stopped. Writes `results/horizons.json` and `.png`, of all seeds that are complete.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, known_result, parser_of, picture, write_result
from texts import VOCABULARY, prepare, wikitext_source

from elastrata.checkpoints.commit import commits
from elastrata.core.mesh import lone_group
from elastrata.launch.quickstart import collect_corpus
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.sweeps.trial import LoneTrial
from elastrata_pipelines.storage import Storage

MODELS = {"gpt": "gpt/quick", "bert": "bert/mini", "small": "gpt/quick"}
_SMALL = ("num_layers=2", "hidden_size=128", "num_heads=2")
SMALLER = {"small": (*(f"workload.{key}" for key in _SMALL), "batch_size=8")}
"""Changes to a recipe, for machines that have no hours."""
TITLES = {"gpt": "gpt/quick", "bert": "bert/mini", "small": "gpt/quick, 2 layers of 128"}
DECAY, WARM_UP = 0.2, 0.1
"""Shares: of each length, and of the shortest one."""
SAMPLES = 256
"""Of the validation text."""
COLORS = {"cosine": "#1769aa", "wsd": "#d1495b"}


def data_set(model: str, wikitext: Path, scratch: Path) -> str:
    """The folder of the model's data set, made unless it is there."""
    data = scratch / f"data-{MODELS[model].partition('/')[0]}"
    library = collect_corpus(scratch / "python").folder
    values = {
        "extends": MODELS[model],
        "data": {
            "path": str(data),
            "prepare": {
                "sources": [
                    {**wikitext_source(wikitext, "train"), "name": "wikitext"},
                    {"name": "python", "paths": str(library), "documents": "file"},
                ],
                "tokenizer": {"vocab_size": VOCABULARY},
                "held_out": [wikitext_source(wikitext, "validation")],
            },
        },
    }
    prepare(scratch / f"{model}.yaml", values)
    return str(data)


class Family:
    """The runs of a model and a seed.

    Args:
        model: a key of `MODELS`.
        data: folder of its data set.
        scratch: gets the runs.
        lengths: in steps, ascending.
        seed: of first weights and order.
    """

    def __init__(
        self, model: str, data: str, scratch: Path, lengths: Sequence[int], seed: int
    ) -> None:
        self._model, self._data, self._lengths, self._seed = model, data, lengths, seed
        self._runs = scratch / "runs"
        self._warmup = max(1, round(WARM_UP * lengths[0]))

    def train(self) -> dict[str, Any]:
        """Trains what is missing; the losses and tokens of all."""
        longest, rows = self._lengths[-1], []
        stem = self._run("stem", longest, shape="wsd", until=longest - decay_steps(longest))
        for length in self._lengths:
            begin = length - decay_steps(length)
            origin = (Storage(str(stem)), folder_of(stem, begin))
            forked = self._run(f"wsd-{length}", length, shape="wsd", origin=origin)
            cosine = self._run(f"cosine-{length}", length, shape="cosine")
            tokens = tokens_after(cosine, length)
            rows.append(
                {
                    "steps": length,
                    "tokens": tokens,
                    "tokens_of_the_decay": tokens - tokens_after(stem, begin),
                    "wsd": held_out_loss(forked, length),
                    "cosine": held_out_loss(cosine, length),
                }
            )
        return {"seed": self._seed, "lengths": rows}

    def _run(
        self,
        name: str,
        steps: int,
        *,
        shape: str,
        until: int | None = None,
        origin: tuple[Storage, str] | None = None,
    ) -> Path:
        """Trains a run to its end, or until a checkpoint of that step; returns its folder."""
        last = until or steps
        folder = self._runs / f"{self._model}-{self._seed}-{name}"
        if any(commit.step >= last for commit in saved(folder)):
            return folder
        recipe = self._recipe(steps, shape, last)
        with lone_group(torch.device("cpu")):
            trial = LoneTrial(recipe, Storage(str(folder)), None if saved(folder) else origin)
            while (report := trial.report()).step < last:
                print(f"{folder.name}: step {report.step}: {report.metrics}", flush=True)
            trial.save()
            trial.close()
        print(f"{folder.name}: step {last}: {report.metrics}", flush=True)
        return folder

    def _recipe(self, steps: int, shape: str, last: int) -> Recipe:
        every = min(decay_steps(length) for length in self._lengths)
        changes = {
            "data.path": self._data,
            "steps": steps,
            "seed": self._seed,
            "schedule.shape": shape,
            "schedule.warmup_steps": self._warmup,
            "evaluation.every": last,
            "evaluation.samples": SAMPLES,
            "checkpoint.every": every,
            "checkpoint.keep_last": 1000,
            "workers.threads": 1,
            **({"schedule.decay.ratio": DECAY} if shape == "wsd" else {}),
        }
        written = [f"{key}={value}" for key, value in changes.items()]
        return load_recipe(MODELS[self._model], [*SMALLER.get(self._model, ()), *written])


def decay_steps(length: int) -> int:
    return round(DECAY * length)


def saved(run: Path) -> list[Any]:
    return list(commits(Storage(str(run)).sub("checkpoints"))) if run.exists() else []


def folder_of(run: Path, step: int) -> str:
    """The checkpoint of that step."""
    return next(commit.folder for commit in saved(run) if commit.step == step)


def tokens_after(run: Path, step: int) -> int:
    return next(commit.tokens for commit in saved(run) if commit.step == step)


def held_out_loss(run: Path, step: int) -> float:
    entries = history.read(Storage(str(run)).sub("history"))
    evaluated = history.surviving_evaluations(entries)
    return next(float(entry["eval/loss"]) for entry in evaluated if entry["step"] == step)


def summary(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures over all seeds of a model."""
    rows = [row for seed in seeds for row in seed["lengths"]]
    lengths = seeds[0]["lengths"]
    stem = lengths[-1]["tokens"] - lengths[-1]["tokens_of_the_decay"]
    decays = sum(row["tokens_of_the_decay"] for row in lengths)
    by_steps = {
        row["steps"]: [own["wsd"] - own["cosine"] for own in rows if own["steps"] == row["steps"]]
        for row in lengths
    }
    longest = lengths[-1]["tokens"]
    return {
        "tokens_of_all_over_those_of_the_longest": round((stem + decays) / longest, 4),
        "wsd_less_cosine": {
            steps: round(statistics.mean(differences), 4) for steps, differences in by_steps.items()
        },
        "largest_difference": round(max(row["wsd"] - row["cosine"] for row in rows), 4),
        "seeds": list(seeds),
    }


def draw(models: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """The held-out loss by length, of both schedules, a panel a model."""
    figure = picture(5 * len(models), 4)
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, (model, figures) in zip(panels, models.items(), strict=True):
        for shape, x, y in points(figures["seeds"]):
            axes.plot(x, y, "o-", color=COLORS[shape], alpha=0.6)
        for shape, label in (("cosine", "a cosine run each"), ("wsd", "one stem, a decay each")):
            axes.plot([], [], "o-", color=COLORS[shape], label=label)
        count = len(figures["seeds"])
        axes.set_title(f"{TITLES[model]}, {count} seed{'s' if count > 1 else ''}")
        axes.set_xlabel("tokens")
        axes.legend(frameon=False)
    panels[0].set_ylabel("held-out loss (nats)")
    figure.savefig(path)


def points(seeds: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[int], list[float]]]:
    """Schedule, tokens and losses of every seed."""
    for seed in seeds:
        tokens = [row["tokens"] for row in seed["lengths"]]
        for shape in COLORS:
            yield shape, tokens, [row[shape] for row in seed["lengths"]]


def main() -> None:
    parser = parser_of(__doc__, wikitext=True)
    parser.add_argument("--scratch", type=Path, required=True, help="keeps data and runs")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[150, 225, 300])
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    scratch: Path = arguments.scratch
    scratch.mkdir(parents=True, exist_ok=True)
    models = known_result("horizons").get("models", {})
    for model in arguments.models:
        data = data_set(model, arguments.wikitext, scratch)
        seeds: list[dict[str, Any]] = []
        for seed in range(arguments.seeds):
            seeds.append(Family(model, data, scratch, sorted(arguments.lengths), seed).train())
            models[model] = summary(seeds)
            write_result("horizons", {"models": models}, ("elastrata", "torch"))
            draw(models, RESULTS / "horizons.png")


if __name__ == "__main__":
    main()
