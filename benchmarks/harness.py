"""What benchmarks share: processes of their own, results with versions and machine, and texts."""

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
    """Trains a run to its end, unless that is done; returns its folder.

    Args:
        recipe: of the run, with held-out data.
        folder: of the run; beside it lies a mark of the end.
    """
    import torch

    from elastrata.parallel.mesh import lone_group
    from elastrata.sweeps.trial import LoneTrial
    from elastrata_pipelines.storage import Storage

    done = folder.with_name(f"{folder.name}.done")
    if done.exists():
        return folder
    with lone_group(torch.device("cpu")):
        trial = LoneTrial(recipe, Storage(str(folder)))
        while (report := trial.report()).state == "running":
            print(f"{folder.name}: step {report.step}: {report.metrics}", flush=True)
        trial.close()
    done.touch()
    return folder


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function in a new process, whose memory and compiled code are its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def on_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, backend: str = "gloo"
) -> list[Any]:
    """The results of `function(rank, *args)` on each of some new ranks of one process group, of one
    thread each; with NCCL each has its GPU."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        group = (ranks, backend, Path(folder))
        torch.multiprocessing.spawn(_on_rank, (*group, function, args), nprocs=ranks)
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

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    where = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=ranks)
    torch.save(function(rank, *args), folder / str(rank))
    dist.barrier()
    dist.destroy_process_group()


def last_line(command: Sequence[str | Path], **environment: str) -> Any:
    """The JSON value that a command prints as its last line.

    Raises:
        RuntimeError: it failed; with the end of what it wrote to stderr.
    """
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, encoding="utf-8"
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stderr[-4000:]}")
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else None


def elastrata(*arguments: str) -> dict[str, Any]:
    """The result of a command of `elastrata`; what it shows people goes to stderr."""
    done = subprocess.run(
        ["elastrata", *arguments, "--json"], check=True, stdout=subprocess.PIPE, encoding="utf-8"
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def trained_steps(recipe: str, *overrides: str) -> list[Any]:
    """The steps of a run by `elastrata train`, whose folder goes away again."""
    from elastrata.run import history
    from elastrata_pipelines.storage import Storage

    with tempfile.TemporaryDirectory() as storage:
        elastrata("train", recipe, f"storage={storage}", *overrides, "--name", "run")
        return list(history.effective_steps(history.read(Storage(storage).sub("run", "history"))))


def versions_in(python: Path, packages: Sequence[str]) -> Mapping[str, str]:
    """The versions of packages in another environment, by the path of its Python."""
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
    """A parser that says what the benchmark's first line says.

    Args:
        doc: the docstring of the benchmark.
        rounds: the default of `--rounds`, where there is that option.
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
    """The folder that is wanted, made where it is not there, or one that goes away again."""
    if wanted:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def medians(rounds: Sequence[Mapping[str, float]], digits: int | None = None) -> dict[str, float]:
    """The median over the rounds of every figure of the first one, rounded to some digits."""
    found = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    if digits is None:
        return found
    return {name: round(value, digits) for name, value in found.items()}


def cpu_milliseconds(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU time of each, taken turn by turn in random order, after a round that warms up.

    CPU time of the process, because a busy machine stretches the time on the clock.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(rounds + 1):
        for name in order.sample(list(runs), len(runs)):
            began = time.process_time()
            runs[name]()
            taken[name].append(1e3 * (time.process_time() - began))
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def of_version(checkout: Path | None, *arguments: str) -> Any:
    """The JSON value that this very script prints last, where it is run with these arguments and
    the Elastrata in a checkout, such as one that `git worktree add` made; None: with this one."""
    paths = [str(checkout / folder) for folder in _FOLDERS] if checkout else []
    done = subprocess.run(
        [sys.executable, sys.argv[0], *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    return json.loads(done.stdout.splitlines()[-1])


def picture(width: float, height: float) -> Any:
    """An empty matplotlib figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def known_result(name: str) -> dict[str, Any]:
    """The figures of `results/<name>.json`, where an earlier run left it."""
    path = RESULTS / f"{name}.json"
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {key: value for key, value in known.items() if key not in _ABOUT}


_FOLDERS = ("platform", "workloads", "pipelines")
_ABOUT = ("command", "machine", "versions")


def write_result(name: str, figures: Mapping[str, Any], packages: Sequence[str]) -> None:
    """Prints figures and writes them to `results/<name>.json`, with command, machine and versions.

    Of absolute paths on the command line only the last part is kept.

    Args:
        name: of the benchmark's file.
        figures: JSON values; `machine` among them replaces that of this machine.
        packages: those whose versions matter.
    """
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
"""Articles and files as they are, or their paragraphs."""
VOCABULARY, NATURAL_LENGTH = 8192, 512
ARTICLE = r"^ = [^=].* = $"


def wikitext_source(wikitext: Path, part: str, documents: Documents = "whole") -> dict[str, str]:
    """One file of WikiText, for a recipe: `train` or `validation`."""
    article = {"document_start": ARTICLE} if documents == "whole" else {"documents": "paragraph"}
    return {"name": part, "paths": str((wikitext / f"{part}.txt").resolve()), **article}


def sources(wikitext: Path, folder: Path, documents: Documents) -> list[dict[str, str]]:
    """WikiText's two files and the library, for a recipe.

    Args:
        wikitext: the folder with train.txt and validation.txt.
        folder: gets a copy of the library's sources.
        documents: into which the texts are taken apart.
    """
    file = "file" if documents == "whole" else "paragraph"
    from elastrata.driver.quickstart import collect_corpus

    library = collect_corpus(folder).folder
    return [
        *(wikitext_source(wikitext, part, documents) for part in ("train", "validation")),
        {"name": "python", "paths": str(library), "documents": file},
    ]


def three_sources(wikitext: Path, folder: Path) -> dict[str, str]:
    """The text of the recipe `gpt/mixture`: the paths of its sources, by their names.

    Args:
        wikitext: the folder with train.txt.
        folder: gets copies of the modules of this Python's library, its packages apart, and of the
            pages of documentation, Markdown and reStructuredText, that lie in installed packages.
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
    return not any(name in part.lower() for part in page.parts for name in ("licens", "test"))


def _copy(files: Iterable[Path], root: Path, folder: Path) -> None:
    """Those that are UTF-8; one that is there already stays, so that its data set stays valid."""
    for file in sorted(files):
        target = folder / file.relative_to(root)
        if target.exists():
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def prepare(recipe: Path, values: dict[str, Any]) -> None:
    """Writes a recipe, and its data set unless it is there."""
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    if not Path(values["data"]["path"], "manifest.json").exists():
        elastrata("prepare", str(recipe))


def natural_length_sources(wikitext: Path) -> list[dict[str, str]]:
    """What people and programmers write in one piece, for a recipe: paragraphs of WikiText,
    functions and classes of the library."""
    library = Path(sysconfig.get_path("stdlib")) / "*.py"
    definition = {"document_start": r"\s*(async def|def|class) "}
    return [
        {**wikitext_source(wikitext, "train", "paragraph"), "name": "wikitext"},
        {"name": "python", "paths": str(library), **definition},
    ]


def prepare_natural_lengths(wikitext: Path, out: Path) -> str:
    """Makes a data set of `natural_length_sources`, cut at 512 tokens. Returns its folder."""
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
    """Writes WikiText and the .py files of the library and of the installed packages, a document a
    file, until they are so long; returns the bytes of text.

    Args:
        data: the folder that holds wikitext/.
        target: a JSON Lines file.
        most_bytes: the document that reaches them is the last.
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
