"""Shared parts of the benchmarks: processes, results with versions and machine, and texts."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

if TYPE_CHECKING:
    from elastrata.recipe.recipe import Recipe


def trained_alone(recipe: Recipe, folder: Path) -> Path:
    """Train a run to its end unless it is already finished; return its folder.

    Args:
        recipe: the run's recipe, with held-out data.
        folder: the run's folder; an empty file next to it, with the suffix `.done`, marks the end.
    """
    import torch

    from elastrata.parallel.mesh import lone_group
    from elastrata.sweeps.trial import LoneTrial
    from elastrata_pipelines.storage import Storage

    end_marker = folder.with_name(f"{folder.name}.done")
    if end_marker.exists():
        return folder
    with lone_group(torch.device("cpu")):
        trial = LoneTrial(recipe, Storage(str(folder)))
        while (report := trial.report()).state == "running":
            print(f"{folder.name}: step {report.step}: {report.metrics}", flush=True)
        trial.close()
    end_marker.touch()
    return folder


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function in a new process, with its own memory and compiled code."""
    # Not forked: a forked process would inherit threads, memory and compiled code.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def on_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, backend: str = "gloo"
) -> list[Any]:
    """Return the results of `function(rank, *args)` on each rank of a new process group.

    Each rank is a process with one thread; with NCCL each has its own GPU.
    """
    import torch

    with tempfile.TemporaryDirectory() as folder:
        group = (ranks, backend, Path(folder))
        torch.multiprocessing.spawn(_on_rank, (*group, function, args), nprocs=ranks)
        # Arbitrary objects, but from our own processes.
        return [torch.load(Path(folder, f"{n}"), weights_only=False) for n in range(ranks)]


def _on_rank(
    rank: int,
    ranks: int,
    backend: str,
    folder: Path,
    function: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    import torch
    import torch.distributed as dist

    # Ranks share the machine's cores.
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    # A file as rendezvous, which needs no free port.
    where = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=ranks)
    torch.save(function(rank, *args), folder / str(rank))
    dist.barrier()
    dist.destroy_process_group()


def last_line(command: Sequence[str | Path], **environment: str) -> Any:
    """Return the JSON value that a command prints as its last line.

    Raises:
        RuntimeError: the command failed; the message has the end of its stderr.
    """
    process = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, encoding="utf-8"
    )
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{process.stderr[-4000:]}")
    lines = process.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else None


def elastrata(*arguments: str) -> dict[str, Any]:
    """Return the result of an `elastrata` command; its messages to the user go to stderr."""
    process = subprocess.run(
        ["elastrata", *arguments, "--json"], check=True, stdout=subprocess.PIPE, encoding="utf-8"
    )
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def trained_steps(recipe: str, *overrides: str) -> list[Any]:
    """Return the steps of an `elastrata train` run whose folder is removed afterwards."""
    from elastrata.run import history
    from elastrata_pipelines.storage import Storage

    with tempfile.TemporaryDirectory() as storage:
        elastrata("train", recipe, f"storage={storage}", *overrides, "--name", "run")
        return list(
            history.effective_steps(history.read_entries(Storage(storage).sub("run", "history")))
        )


def versions_in(python: Path, packages: Sequence[str]) -> Mapping[str, str]:
    """Return the versions of packages in another environment, given by its Python."""
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    versions: Mapping[str, str] = last_line([python, "-c", code, *packages])
    return versions


RESULTS = Path(__file__).parent / "results"


def parser_of(
    doc: str | None, *, rounds: int | None = None, wikitext: bool = False
) -> argparse.ArgumentParser:
    """Return a parser whose description is the first line of the benchmark's docstring.

    Args:
        doc: docstring of the benchmark.
        rounds: default of `--rounds`; None: no such option.
        wikitext: whether the first argument is the folder of WikiText.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if wikitext:
        help_line = "folder with train.txt and validation.txt"
        parser.add_argument("wikitext", type=Path, help=help_line)
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds)
    return parser


@contextmanager
def scratch_folder(wanted: Path | None = None) -> Iterator[Path]:
    """Yield `wanted`, created if missing, or a temporary folder."""
    if wanted:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def medians(rounds: Sequence[Mapping[str, float]], digits: int | None = None) -> dict[str, float]:
    """Return the median over the rounds of every figure in the first round, rounded to `digits`."""
    values = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    if digits is None:
        return values
    return {name: round(value, digits) for name, value in values.items()}


def cpu_milliseconds(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median CPU time of each function, after a warm-up round.

    In every round the functions run in random order.
    """
    times_by_name: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(rounds + 1):
        for name in order.sample(list(runs), len(runs)):
            # CPU time of the process: on a busy machine wall-clock time is longer.
            start_time = time.process_time()
            runs[name]()
            times_by_name[name].append(1e3 * (time.process_time() - start_time))
    return {name: statistics.median(times[1:]) for name, times in times_by_name.items()}


def of_version(checkout: Path | None, *arguments: str) -> Any:
    """Run this script with another version of Elastrata and return its last line as JSON.

    `checkout` is a folder such as one that `git worktree add` creates; None: this version.
    """
    paths = [str(checkout / folder) for folder in _FOLDERS] if checkout else []
    process = subprocess.run(
        [sys.executable, sys.argv[0], *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    return json.loads(process.stdout.splitlines()[-1])


def picture(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of this size in inches."""
    # Without pyplot: it keeps figures open and may need a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def known_result(name: str) -> dict[str, Any]:
    """Return the figures of `results/<name>.json` from an earlier run, or an empty dictionary."""
    path = RESULTS / f"{name}.json"
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {key: value for key, value in stored.items() if key not in _ABOUT}


_FOLDERS = ("platform", "workloads", "pipelines")
_ABOUT = ("command", "machine", "versions")


def write_result(name: str, figures: Mapping[str, Any], packages: Sequence[str]) -> None:
    """Print figures and write them to `results/<name>.json`, with command, machine and versions.

    Args:
        name: name of the benchmark's file.
        figures: JSON values; a key `machine` replaces the description of this machine.
        packages: packages whose versions are recorded.
    """
    # Results are published: absolute paths of this machine are reduced to their last part.
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    about = {
        "command": " ".join([f"python benchmarks/{Path(sys.argv[0]).name}", *words]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in packages},
        },
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(
        json.dumps({**about, **figures}, indent=1) + "\n", encoding="utf-8"
    )
    print(json.dumps(figures, indent=1))


Documents = Literal["whole", "paragraph"]
"""Unit of a document: whole articles and files, or their paragraphs."""
VOCABULARY, NATURAL_LENGTH = 8192, 512
ARTICLE = r"^ = [^=].* = $"


def wikitext_source(wikitext: Path, part: str, documents: Documents = "whole") -> dict[str, str]:
    """Return one file of WikiText, `train` or `validation`, as a source of a recipe."""
    article = {"document_start": ARTICLE} if documents == "whole" else {"documents": "paragraph"}
    # An absolute path, as the recipe is stored in another folder.
    return {"name": part, "paths": str((wikitext / f"{part}.txt").resolve()), **article}


def sources(wikitext: Path, folder: Path, documents: Documents) -> list[dict[str, str]]:
    """Return WikiText's two files and the standard library as sources of a recipe.

    Args:
        wikitext: folder with train.txt and validation.txt.
        folder: folder that gets a copy of the library's sources.
        documents: unit of a document.
    """
    file = "file" if documents == "whole" else "paragraph"
    from elastrata.driver.quickstart import collect_corpus

    library = collect_corpus(folder).folder
    return [
        *(wikitext_source(wikitext, part, documents) for part in ("train", "validation")),
        {"name": "python", "paths": str(library), "documents": file},
    ]


def three_sources(wikitext: Path, folder: Path) -> dict[str, str]:
    """Return the paths of the sources of the recipe `gpt/mixture`, by name.

    Args:
        wikitext: folder with train.txt.
        folder: folder that gets copies of the modules of this Python's library, without its
            packages, and of the documentation (Markdown and reStructuredText) in installed
            packages.
    """
    library, packages = (Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib"))
    pages = (page for page in packages.rglob("*") if page.suffix in (".md", ".rst"))
    _copy(library.glob("*.py"), library, folder / "python")
    _copy((page for page in pages if _is_documentation(page)), packages, folder / "docs")
    return {
        "wikitext": str((wikitext / "train.txt").resolve()),
        "python": str(folder / "python"),
        "docs": str(folder / "docs"),
    }


def _is_documentation(page: Path) -> bool:
    # Licences are duplicates of one another, and tests are not documentation.
    return not any(name in part.lower() for part in page.parts for name in ("licens", "test"))


def _copy(files: Iterable[Path], root: Path, folder: Path) -> None:
    """Copy the UTF-8 files below `root` to `folder`; existing copies are kept."""
    for file in sorted(files):
        target = folder / file.relative_to(root)
        # An unchanged copy keeps the data set made from it valid.
        if target.exists():
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def prepare(recipe: Path, values: dict[str, Any]) -> None:
    """Write a recipe, and prepare its data set if it is missing."""
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    if not Path(values["data"]["path"], "manifest.json").exists():
        elastrata("prepare", str(recipe))


def natural_length_sources(wikitext: Path) -> list[dict[str, str]]:
    """Return sources of natural length: WikiText's paragraphs, the library's functions and
    classes."""
    library = Path(sysconfig.get_path("stdlib")) / "*.py"
    definition = {"document_start": r"\s*(async def|def|class) "}
    return [
        {**wikitext_source(wikitext, "train", "paragraph"), "name": "wikitext"},
        {"name": "python", "paths": str(library), **definition},
    ]


def prepare_natural_lengths(wikitext: Path, out: Path) -> str:
    """Prepare a data set of `natural_length_sources`, cut at 512 tokens; return its folder."""
    overrides = [
        f"data.prepare.sources={json.dumps(natural_length_sources(wikitext))}",
        "data.prepare.held_out=null",
        f"data.prepare.tokenizer={{train: wordpiece, vocab_size: {VOCABULARY}}}",
        f"data.prepare.seq_len={NATURAL_LENGTH}",
        "data.prepare.stripe_size=512",
        f"data.path={out}",
    ]
    elastrata("prepare", "bert/mini", *overrides)
    return str(out)


def write_json_lines(data: Path, target: Path, most_bytes: int) -> int:
    """Write documents to a JSON Lines file up to a size; return the bytes of text.

    The documents are WikiText's files and the .py files of the library and of installed packages.

    Args:
        data: folder that contains wikitext/.
        target: the JSON Lines file.
        most_bytes: writing ends with the document that reaches this size.
    """
    size = 0
    with target.open("w", encoding="utf-8") as stream:
        for text in _documents(data / "wikitext"):
            stream.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode())
            if size >= most_bytes:
                break
    return size


def _documents(wikitext: Path) -> Iterator[str]:
    yield (wikitext / "train.txt").read_text(encoding="utf-8")
    yield (wikitext / "validation.txt").read_text(encoding="utf-8")
    for kind in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_paths()[kind]).rglob("*.py")):
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if text.strip():
                yield text
