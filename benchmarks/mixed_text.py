"""Three sources of real text, mixed as they are read: the pictures, and the same mixture baked in.

    taskset -c 0 python benchmarks/mixed_text.py ../shared/data/wikitext --scratch mixed --seeds 5

The text is WikiText's articles, the sources of this Python's standard library, and the docstrings
of installed packages. First the recipe `mixed_text.yaml`, two stages in the second of which the
shares change, is trained, and its shares and losses drawn. Then a mixture at read time, shares of
tokens of 50, 30 and 20%, beside a data set into which `prepare` has mixed the same text at the same
shares, seed by seed: the same tokenizer, held-out documents, first weights, batches and steps. Both
are evaluated on what is held out of every source. One process, one thread, no Ray but in `prepare`.

Runs that are in the scratch folder are not trained again: the same command goes on where it was
stopped. Writes `results/mixed_text.json`, `mixed_text_shares.png`, `mixed_text_losses.png`,
`mixed_text_held_out.png`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, parser_of, write_result
from processes import elastrata

from elastrata.core.mesh import lone_group
from elastrata.launch.quickstart import collect_corpus
from elastrata.recipe.file import load_recipe
from elastrata.run import history
from elastrata.run.audit import audit
from elastrata.run.pictures import evaluations
from elastrata.sweeps.lone_trial import LoneTrial
from elastrata.tracking.mixture_plots import held_out_losses, share_curves, source_losses
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.storage import Storage

RECIPE = str(Path(__file__).with_suffix(".yaml"))
SHARES = {"wikitext": 0.5, "python": 0.3, "docs": 0.2}
SETS = {"wikitext": "eval/loss", "python": "eval/code/loss", "docs": "eval/docstrings/loss"}
"""The metric of the held-out documents of each source."""
PACKAGES = ("numpy", "pandas", "pydantic", "pyarrow", "fsspec", "matplotlib")
"""Those whose docstrings are the third source."""
STEPS = 400
EPOCHS = 1.2
"""Tokens of the baked data set over those of a run: no document comes twice in either."""


def write_docs(folder: Path) -> None:
    """The docstrings of some installed packages, a file for each package."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        file = folder / f"{package}.txt"
        if not file.exists():
            found = importlib.util.find_spec(package)
            assert found is not None
            assert found.origin is not None
            file.write_text("\n\n".join(docstrings(Path(found.origin).parent)))


def docstrings(package: Path) -> Iterator[str]:
    """Each in one paragraph of lines."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for path in sorted(package.rglob("*.py")):
        if "tests" not in path.parts:
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, kinds) and (told := ast.get_docstring(node)):
                    yield "\n".join(line for line in told.splitlines() if line.strip())


def paths(wikitext: Path, scratch: Path) -> dict[str, str]:
    """Where the text of each source lies."""
    write_docs(scratch / "docs")
    return {
        "wikitext": str((wikitext / "train.txt").resolve()),
        "python": str(collect_corpus(scratch / "python").folder),
        "docs": str(scratch / "docs"),
    }


def changes(texts: Mapping[str, str], data: Path) -> list[str]:
    """Those to the recipe that say where its text and its data are."""
    places = enumerate(texts.values())
    return [*(f"data.prepare.sources.{n}.paths={path}" for n, path in places), f"data.path={data}"]


def prepare_sources(texts: Mapping[str, str], data: Path) -> None:
    """A data set for each source, unless they are there."""
    if not all((data / name / "manifest.json").exists() for name in texts):
        elastrata("prepare", RECIPE, *changes(texts, data))


def prepare_baked(texts: Mapping[str, str], data: Path, baked: Path) -> None:
    """One data set of all sources, every one's documents as often as its share asks for."""
    if (baked / "manifest.json").exists():
        return
    tokens = {name: manifest(data / name).tokens for name in texts}
    wanted = EPOCHS * STEPS * tokens_per_step(data)
    prepared = load_recipe(RECIPE).data.prepare
    assert prepared is not None
    values = prepared.model_dump(mode="json", exclude_unset=True)
    values["tokenizer"] = {"load": str(data / "wikitext" / "tokenizer")}
    for source in values["sources"]:
        name = source["name"]
        weight = SHARES[name] * wanted / tokens[name]
        source.update(paths=texts[name], weight=round(weight, 6))
    elastrata("prepare", "gpt/quick", f"data.prepare={json.dumps(values)}", f"data.path={baked}")


def manifest(folder: Path) -> Manifest:
    return Manifest.read(Storage(str(folder)))


def tokens_per_step(data: Path) -> float:
    """Of the mixture, whose samples of each source have their own mean length."""
    means = {name: manifest(data / name).tokens / manifest(data / name).samples for name in SHARES}
    samples = {name: share / means[name] for name, share in SHARES.items()}
    return load_recipe(RECIPE).batch_size * sum(SHARES.values()) / sum(samples.values())


def train(name: str, said: Sequence[str], runs: Path) -> Path:
    """Trains a run to its end unless it is there; returns its folder."""
    folder, done = runs / name, runs / f"{name}.done"
    if done.exists():
        return folder
    recipe = load_recipe(RECIPE, said)
    torch.set_num_threads(1)
    with lone_group(torch.device("cpu")):
        trial = LoneTrial(recipe, Storage(str(folder)))
        while (report := trial.report()).state == "running":
            print(f"{name}: step {report.step}: {report.metrics}", flush=True)
        trial.close()
    done.touch()
    return folder


def show_stages(texts: Mapping[str, str], data: Path, runs: Path) -> dict[str, Any]:
    """Trains the two stages, draws them, and proves their samples."""
    run = train("stages", changes(texts, data), runs)
    entries = history.read(Storage(str(run)).sub("history"))
    steps = history.effective_steps(entries)
    share_curves(steps, RESULTS / "mixed_text_shares.png")
    source_losses(steps, RESULTS / "mixed_text_losses.png")
    told = evaluations(entries, steps)
    held_out_losses(told, RESULTS / "mixed_text_held_out.png")
    proof = audit(Storage(str(run)))
    return {
        "tokens": steps[-1]["tokens"],
        "held_out_losses": {name: round(told[-1][f"eval/loss/{name}"], 4) for name in SHARES},
        "held_out_losses_before_the_last_stage": {
            name: round(told[len(told) * 7 // 10 - 1][f"eval/loss/{name}"], 4) for name in SHARES
        },
        "last_shares": {
            name: round(sum(step["batch_tokens_by_source"][name] for step in steps[-10:])
                        / sum(step["batch_tokens"] for step in steps[-10:]), 3)
            for name in SHARES
        },
        "digests_checked": proof.digests_checked,
        "problems": list(proof.problems),
        "epochs_by_source": dict(zip(SHARES, (round(e, 3) for e in proof.epochs), strict=False)),
    }  # fmt: skip


def both(seed: int, data: Path, baked: Path, runs: Path) -> dict[str, Any]:
    """The held-out losses of a mixture at read time, and of the one that is baked in."""
    sets = [
        {"name": name, "path": str(data / source / "held_out")}
        for name, source in (("code", "python"), ("docstrings", "docs"))
    ]
    common = [
        "phases=[]",
        f"steps={STEPS}",
        f"seed={seed}",
        f"evaluation={{path: {data / 'wikitext' / 'held_out'}, every: {STEPS}, samples: 384}}",
        f"evaluation.sets={json.dumps(sets)}",
        "data.prepare=null",
    ]
    shares = [{"name": name, "weight": share} for name, share in SHARES.items()]
    ways = {
        "read": [f"data.path={data}", f"data.sources={json.dumps(shares)}"],
        "baked": [f"data.path={baked}", "data.sources=[]"],
    }
    return {
        "seed": seed,
        **{way: losses(train(f"{way}-{seed}", [*common, *own], runs)) for way, own in ways.items()},
    }


def losses(run: Path) -> dict[str, Any]:
    """By source, at the end; and the tokens that it has seen."""
    entries = history.read(Storage(str(run)).sub("history"))
    (*_, last) = history.surviving_evaluations(entries)
    steps = history.effective_steps(entries)
    return {
        **{name: float(last[metric]) for name, metric in SETS.items()},
        "tokens": steps[-1]["tokens"],
    }


def summary(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Read time less baked, by source: mean and standard error over the seeds, beside the deviation
    of the seeds of one way."""
    figures = {}
    for name in SHARES:
        differences = [seed["read"][name] - seed["baked"][name] for seed in seeds]
        figures[name] = {
            "read": round(statistics.mean(seed["read"][name] for seed in seeds), 4),
            "baked": round(statistics.mean(seed["baked"][name] for seed in seeds), 4),
            "read_less_baked": round(statistics.mean(differences), 4),
        }
        if len(seeds) > 1:
            deviation = statistics.stdev(differences)
            figures[name]["standard_error"] = round(deviation / len(seeds) ** 0.5, 4)
            one_way = [seed["read"][name] for seed in seeds]
            figures[name]["deviation_of_seeds"] = round(statistics.stdev(one_way), 4)
    return figures


def main() -> None:
    parser = parser_of(__doc__, wikitext=True)
    parser.add_argument("--scratch", type=Path, required=True, help="keeps data and runs")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    scratch: Path = arguments.scratch.resolve()
    data, baked, runs = scratch / "mix", scratch / "baked", scratch / "runs"
    texts = paths(arguments.wikitext, scratch)
    prepare_sources(texts, data)
    prepare_baked(texts, data, baked)
    figures: dict[str, Any] = {
        "tokens_by_source": {name: manifest(data / name).tokens for name in texts},
        "tokens_baked": {entry.name: entry.tokens for entry in manifest(baked).sources},
        "stages": show_stages(texts, data, runs),
        "steps": STEPS,
    }
    seeds: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        seeds.append(both(seed, data, baked, runs))
        figures |= {"by_source": summary(seeds), "seeds": seeds}
        write_result("mixed_text", figures, ("elastrata", "torch"))


if __name__ == "__main__":
    main()
