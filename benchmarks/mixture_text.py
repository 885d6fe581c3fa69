"""Three sources of real text in two stages, with different shares in the second.

    python benchmarks/mixture_text.py ../shared/data/wikitext --scratch mixture

Trains the recipe `gpt/mixture` on WikiText's articles, the modules of this Python's library, and
the documentation in installed packages, in one process with one thread. Then audits the samples of
every step, and draws shares and losses over tokens.

Data and runs in the scratch folder are reused. Writes `results/mixture_text.json`,
`mixture_shares.png`, `mixture_losses.png` and `mixture_held_out.png`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import RESULTS, elastrata, parser_of, three_sources, trained_alone, write_result
from PIL import Image

from elastrata.recipe.file import load_recipe
from elastrata.run import history
from elastrata.run.audit import Audit, audit
from elastrata.run.pictures import evaluations
from elastrata.tracking.plots import plot_held_out_losses, share_curves, source_losses
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.storage import Storage

RECIPE = "gpt/mixture"
AT_AN_END = 20
"""Number of steps at each end of a stage over which shares are averaged."""


def prepared_sources(wikitext: Path, scratch: Path) -> list[str]:
    """Prepare a data set for each source if missing; return overrides for texts and data."""
    texts = three_sources(wikitext, scratch)
    data = scratch / "mix"
    paths = [f"data.prepare.sources.{n}.paths={path}" for n, path in enumerate(texts.values())]
    changes = [*paths, f"data.path={data}"]
    if not all((data / name / "manifest.json").exists() for name in texts):
        elastrata("prepare", RECIPE, *changes)
    return changes


def stage_figures(
    steps: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Return the shares of tokens at both ends of a stage, and its final held-out losses.

    Args:
        steps: the stage's steps.
        told: the run's evaluations.
    """
    names = list(steps[0]["batch_tokens_by_source"])
    # The evaluation at the end of the stage.
    (last,) = (one for one in told if one["tokens"] == steps[-1]["tokens"])
    return {
        "steps": len(steps),
        "shares_at_its_beginning": shares(steps[:AT_AN_END], names),
        "shares_at_its_end": shares(steps[-AT_AN_END:], names),
        "held_out_losses": {name: round(last[f"eval/loss/{name}"], 4) for name in names},
    }


def shares(steps: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, float]:
    """Return each source's share of the tokens in some steps."""
    num_tokens = sum(step["batch_tokens"] for step in steps)
    counts = {
        name: sum(step["batch_tokens_by_source"].get(name, 0) for step in steps) for name in names
    }
    return {name: round(count / num_tokens, 4) for name, count in counts.items()}


def draw(name: str, picture: Callable[[Path], None]) -> None:
    """Draw a picture into `results`."""
    path = RESULTS / name
    picture(path)
    with Image.open(path) as image:
        # 64 colours suffice for lines and halve the size of the file.
        image.convert("RGB").quantize(64).save(path, optimize=True)


def proof(found: Audit) -> dict[str, Any]:
    """Return the audit's findings."""
    return {"digests_checked": found.digests_checked, "problems": list(found.problems)}


def tokens_of(data: Path) -> int:
    """Return the number of tokens of a data set for training."""
    return Manifest.read(Storage(str(data))).tokens


def main() -> None:
    parser = parser_of(__doc__, wikitext=True)
    parser.add_argument("--scratch", type=Path, required=True, help="keeps data and run")
    arguments = parser.parse_args()
    scratch: Path = arguments.scratch.resolve()
    recipe = load_recipe(RECIPE, prepared_sources(arguments.wikitext, scratch))
    run = Storage(str(trained_alone(recipe, scratch / "runs" / "stages")))
    entries = history.read_entries(run.sub("history"))
    steps = history.effective_steps(entries)
    evaluated = evaluations(entries, steps)
    draw("mixture_shares.png", partial(share_curves, steps))
    draw("mixture_losses.png", partial(source_losses, steps))
    draw("mixture_held_out.png", partial(plot_held_out_losses, evaluated))
    ends = [phase.steps for phase in recipe.phases]
    broad, annealed = steps[: ends[0]], steps[ends[0] :]
    names = [source.name for source in recipe.data.sources]
    figures = {
        "tokens_by_source": {name: tokens_of(scratch / "mix" / name) for name in names},
        "tokens": steps[-1]["tokens"],
        "broad": stage_figures(broad, evaluated),
        "annealed": stage_figures(annealed, evaluated),
        "audit": proof(audit(run)),
    }
    write_result("mixture_text", figures, ("elastrata", "torch"))


if __name__ == "__main__":
    main()
