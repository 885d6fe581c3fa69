"""The first half hour on a GPU: whether models are right, how fast, and how much memory they take.

    make gpu
    python benchmarks/gpu.py --results gpu.jsonl --minutes 10
    python benchmarks/gpu.py --device cpu --tiny

A table of cases, most valuable first; nothing is needed but PyTorch, the checkout and a few small
wheels (`make gpu-wheels`). Every case has a process and a time of its own, and is a row of a JSON
Lines file, written as soon as it ends: its `status` is `ok`, `wrong` (something else was computed
than should be), `out of memory`, `timeout`, `crashed` or `failed`. The next call goes on after the
last row; `--again` repeats what did not end well. Of cases that differ in what is computed again
the first that fits into memory counts.

Samples are random tokens, of full length or of natural ones: of English Wikipedia's, or drawn from
the histogram of `--lengths` (docs/commands.md). MFU halves attention where it is causal, and does
not count what is computed again; its peak is that of the device for dense bf16.

`--device cpu --tiny` tries the table without a GPU: all but compilation and what CUDA does, with
tiny models. `--device fake` tries the cases of speed, with models of their real sizes, on tensors
without numbers.

This file needs nothing but Python's own library, so that it can tell what is missing.

    python benchmarks/gpu.py --case ASKED TOLD

is the process of one case: it reads the one file and writes the other.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SITE = ROOT / "build" / "gpu"
"""What a machine lacks is installed here."""
NEEDED = {"numpy": "numpy", "fsspec": "fsspec", "pyarrow": "pyarrow", "yaml": "pyyaml"} | {
    name: name for name in ("pydantic", "tenacity")
}
"""By the name of the module, the package; beside PyTorch."""


def installed(wheels: Path) -> Mapping[str, str]:
    """The environment of all cases, in which there is what they import.

    What is missing is installed into a folder of the checkout: from the folder of wheels where
    there is one, else from the package index.
    """
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"{sys.executable} has no PyTorch; PYTHON=... names another Python")
    sys.path.append(str(SITE))
    missing = [package for module, package in NEEDED.items() if not _is_there(module)]
    if missing:
        _install(missing, wheels)
    if not list(importlib.metadata.distributions(name="elastrata")):
        _register()
    paths = [HERE, ROOT / "platform", ROOT / "pipelines", ROOT / "workloads", SITE]
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*map(str, paths), *([inherited] if inherited else [])])}


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _install(packages: Sequence[str], wheels: Path) -> None:
    carried = ["--no-index", "--find-links", str(wheels)] if any(wheels.glob("*.whl")) else []
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["-c", str(ROOT / "constraints.txt"), "--upgrade", "--target", str(SITE)]
    if subprocess.run([*command, *carried, *constraints, *packages]).returncode:
        lacks = f"{wheels} does not hold all of them" if carried else f"{wheels} holds no wheels"
        sys.exit(f"missing: {', '.join(packages)}; {lacks}: `make gpu-wheels`, with a network")


def _register() -> None:
    """Tells Python of the checkout's workloads, as an installation would."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = SITE / f"elastrata-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    about = f"Metadata-Version: 2.1\nName: elastrata\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(about, encoding="utf-8")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


REHEARSED = ("gpu_cases:machine", "gpu_cases:steps")
"""All others look at numbers."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row that is to be."""

    name: str
    function: str
    """`module:function`; its result, a dictionary, is the row's."""
    seconds: float
    """It is killed after so long."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the function, and part of the row."""
    instead_of: str = ""
    """Runs only where the case of this name ran out of memory."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its process, on a GPU."""


def _fitting(part: str, model: str, *overrides: str, seconds: float, **values: Any) -> list[Case]:
    """Steps of a model, with as little computed again as fits."""
    cases: list[Case] = []
    for way in ("none", "selective", "full"):
        cases.append(
            Case(
                name=f"{part}: {model}, {way}",
                function="gpu_cases:steps",
                seconds=seconds,
                instead_of=cases[-1].name if cases else "",
                values={
                    "model": model,
                    "overrides": [*overrides, f"activation_checkpointing={way}"],
                    **values,
                },
            )
        )
    return cases


def _check(name: str, function: str, seconds: float, **values: Any) -> Case:
    return Case(
        name=f"check: {name}", function=f"gpu_cases:{function}", seconds=seconds, values=values
    )


COMPILED, EAGER = "compile=true", "compile=false"
NATURAL = "natural"
CHECKS = [
    Case(name="machine", function="gpu_cases:machine", seconds=240),
    _check("varlen attention beside dense", "attention_beside_dense", 120),
    _check("steps beside the CPU's", "steps_beside_cpu", 120),
    _check("saved and loaded", "saved_and_loaded", 120),
    _check("compiled, each way of checkpointing", "ways_agree", 180),
    Case(
        name="check: streams, sanitised",
        function="gpu_cases:streams",
        seconds=120,
        environment={"TORCH_CUDA_SANITIZER": "1"},
    ),
]
MODELS = [
    *_fitting("speed", "gpt/125m", COMPILED, seconds=120, aim=0.40),
    *_fitting("speed", "gpt/1.3b", COMPILED, seconds=150, aim=0.50),
    *_fitting("speed", "bert/large", COMPILED, seconds=150, lengths=NATURAL, published=833),
    *_fitting("speed", "gpt/760m", COMPILED, seconds=150, aim=0.45),
    *_fitting("speed", "gpt/350m", COMPILED, seconds=120),
]
LARGE = [
    *_fitting("speed", "gpt/7b", COMPILED, seconds=240, aim=0.52),
    *(
        case
        for model, sizes, lengths in (
            ("bert/large", (32768,), NATURAL),
            ("gpt/125m", (32768, 65536), "full"),
            ("gpt/1.3b", (4096, 16384, 32768), "full"),
        )
        for size in sizes
        for case in _fitting(
            f"micro-batches of {size}",
            model,
            COMPILED,
            f"micro_batch_tokens={size}",
            seconds=120,
            lengths=lengths,
        )
    ),
    *(
        case
        for model, lengths in (("bert/large", NATURAL), ("gpt/125m", "full"))
        for case in _fitting(
            "parameters kept",
            model,
            COMPILED,
            "parallel.reshard_after_forward=false",
            seconds=120,
            lengths=lengths,
        )
    ),
    *_fitting("padded", "bert/large", COMPILED, seconds=120, lengths=NATURAL, padded=True),
    *(
        Case(
            name=f"trace: {model}",
            function="gpu_cases:trace",
            seconds=150,
            values={"model": model, "overrides": [COMPILED], "lengths": lengths},
        )
        for model, lengths in (("gpt/1.3b", "full"), ("bert/large", NATURAL))
    ),
]
TWO_FOUR = [
    *(
        Case(
            name=f"2:4 products: {model}",
            function="gpu_cases:two_four_products",
            seconds=120,
            values={"model": model},
        )
        for model in ("gpt/1.3b", "gpt/7b")
    ),
    *(
        case
        for way, sparsity in (
            ("dense", ()),
            ("masks", ("sparsity={method: two_four}",)),
            ("kernels", ("sparsity={method: two_four, kernels: true}",)),
        )
        for case in _fitting(
            f"2:4 {way}",
            "gpt/1.3b",
            COMPILED,
            "precision=bf16",
            "workload.num_layers=6",
            *sparsity,
            seconds=120,
        )
    ),
]
REST = [
    _check("BERT's loss and gradients", "bert_agrees", 240, model="bert/base", lengths=NATURAL),
    *_fitting("eager", "gpt/1.3b", EAGER, seconds=120),
    *_fitting("speed", "bert/base", COMPILED, seconds=120, lengths=NATURAL),
    *_fitting("full length", "bert/large", COMPILED, seconds=120),
    *(
        Case(
            name=f"clip: {way}",
            function="gpu_cases:clip_beside",
            seconds=120,
            values={
                "model": "bert/large",
                "overrides": [COMPILED, f"clip.method={way}"],
                "lengths": NATURAL,
            },
        )
        for way in ("none", "global_norm", "bucketwise")
    ),
]
TABLE = (*CHECKS, *MODELS, *LARGE, *TWO_FOUR, *REST)


OK, WRONG, NO_MEMORY, TIMEOUT = "ok", "wrong", "out of memory", "timeout"
CRASHED, FAILED = "crashed", "failed"
FAKE = "fake"
_SHOWN_LINES, _SHOWN_CHARACTERS = 6, 1000
Row = dict[str, Any]


def apart(
    case: Case, seconds: float, options: Mapping[str, Any], environment: Mapping[str, str]
) -> Row:
    """The row of a case, from a process that is killed with all its children in the end."""
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder, "asked.json"), Path(folder, "told.json")
        values = {"function": case.function, "values": {**case.values, **options}}
        asked.write_text(json.dumps(values), encoding="utf-8")
        with Path(folder, "output").open("w+b") as output:
            child = subprocess.Popen(
                [sys.executable, __file__, "--case", str(asked), str(told)],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                return {"status": TIMEOUT, "error": f"not done after {seconds:.0f} s"}
            finally:
                _kill(child)
            if told.is_file():
                row: Row = json.loads(told.read_text(encoding="utf-8"))
                return row
            output.seek(0)
            return {"status": CRASHED, "error": _crash(code, output.read())}


def _kill(child: subprocess.Popen[bytes]) -> None:
    """The child and its group, whose id it has until it is waited for; what is left of the group
    keeps the id from being given anew."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _crash(code: int, output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"{how}: {' / '.join(lines)}"[:_SHOWN_CHARACTERS]


def one(asked: Path, told: Path) -> None:
    """A case, in its own process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with its parent
    wanted = json.loads(asked.read_text(encoding="utf-8"))
    module, function = wanted["function"].split(":")
    try:
        with _rehearsed() if wanted["values"]["device"] == FAKE else contextlib.nullcontext():
            found = getattr(importlib.import_module(module), function)(**wanted["values"])
        row = {"status": OK if found.pop("is_right", True) else WRONG, **found}
    except Exception as error:
        text = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
        is_memory = type(error).__name__ == "OutOfMemoryError" or "out of memory" in text
        status = NO_MEMORY if is_memory else FAILED
        row = {"status": status, "error": f"{type(error).__name__}: {text}"}
    unfinished = told.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(row), encoding="utf-8")
    unfinished.rename(told)
    sys.stdout.flush()
    os._exit(0)  # a library that hangs or crashes while Python ends has no say any more


@contextlib.contextmanager
def _rehearsed() -> Iterator[None]:
    """A GPU that is not there: its tensors have shapes and no numbers."""
    shim = importlib.import_module("elastrata.rehearsal.process")
    shim.load_shim()
    session = importlib.import_module("elastrata.rehearsal.session")
    with session.rehearsal(world_size=None):
        yield


_LEAST_SECONDS = 20.0
"""No case is begun with less time."""


class Rows:
    """Runs cases, each in a process of its own, and keeps their rows.

    Args:
        results: the JSON Lines file.
        minutes: no case is begun, or goes on, after so long.
        again: whether cases that did not end well are repeated.
        options: further arguments of every case's function.
        environment: further variables of every case.
    """

    def __init__(
        self,
        results: Path,
        *,
        minutes: float,
        again: bool = False,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        self._results, self._again = results, again
        self._options, self._environment = options, environment
        self._end = time.monotonic() + 60 * minutes
        results.parent.mkdir(parents=True, exist_ok=True)
        self.rows = {row["case"]: row for row in read_rows(results)}

    def run(self, cases: Sequence[Case]) -> None:
        """All that have no row yet, as far as the time goes."""
        for case in cases:
            if self._is_done(case) or not self._is_wanted(case):
                continue
            left = self._end - time.monotonic()
            if left < min(_LEAST_SECONDS, case.seconds):
                print(f"no time is left: the same command goes on with {case.name!r}", flush=True)
                return
            self._add(case, min(left, case.seconds))

    def _is_done(self, case: Case) -> bool:
        row = self.rows.get(case.name)
        return bool(row) and (not self._again or row["status"] in (OK, NO_MEMORY))

    def _is_wanted(self, case: Case) -> bool:
        before = self.rows.get(case.instead_of, {})
        return not case.instead_of or before.get("status") == NO_MEMORY

    def _add(self, case: Case, seconds: float) -> None:
        began = time.monotonic()
        on_gpu = case.environment if self._options["device"] == "cuda" else {}
        found = apart(case, seconds, self._options, {**self._environment, **on_gpu})
        if found["status"] == TIMEOUT and seconds < case.seconds:
            print(f"no time is left for {case.name!r}", flush=True)
            return  # it is begun anew the next time
        about = {"case": case.name, **case.values}
        row = {**about, **found, "case_seconds": round(time.monotonic() - began, 1)}
        append(self._results, row)
        self.rows[case.name] = row
        print(json.dumps(_short(row)), flush=True)


def read_rows(results: Path) -> Iterator[Row]:
    """The rows of a file, which may have been cut off in the last one."""
    text = results.read_text(encoding="utf-8") if results.is_file() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def append(results: Path, row: Row) -> None:
    """Writes a row so that it is there whatever comes, on a line of its own."""
    with results.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _short(row: Row) -> Row:
    """What is shown of a row, while others are measured."""
    rates = ("sequences_per_second", "tokens_per_second", "mfu")
    shown = {key: row[key]["median"] for key in rates if row.get(key)}
    kept = ("case", "status", "error", "allocated_bytes", "plan_allocated_bytes", "case_seconds")
    return {key: row[key] for key in kept if key in row} | shown


LENGTHS = ROOT / "tests" / "data" / "wikipedia_lengths_512.json"
"""Of natural samples: English Wikipedia's, with their source."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("gpu.jsonl"), metavar="FILE")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all of it; default 30")
    parser.add_argument("--cases", default="", help="begin with one of these words, commas between")
    parser.add_argument("--again", action="store_true", help="what did not end well, once more")
    parser.add_argument(
        "--lengths", type=Path, metavar="FILE", default=LENGTHS, help="JSON histogram"
    )
    parser.add_argument("--device", choices=("cuda", "cpu", FAKE), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="name the cases, run none")
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    words = tuple(arguments.cases.split(","))
    cases = [case for case in TABLE if case.name.startswith(words)]
    if arguments.device == FAKE:
        cases = [case for case in cases if case.function in REHEARSED]
    if arguments.list:
        for case in cases:
            print(f"{case.seconds:4.0f} s  {case.name}")
        return
    environment = dict(installed(arguments.wheels.resolve()))
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # as `elastrata` has it
    if arguments.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    results = arguments.results.resolve()
    options = {
        "device": arguments.device,
        "is_tiny": arguments.tiny,
        "histogram": str(arguments.lengths.resolve()),
        "folder": str(results.parent),
    }
    rows = Rows(
        results,
        minutes=arguments.minutes,
        again=arguments.again,
        options=options,
        environment=environment,
    )
    rows.run(cases)
    statuses = [row["status"] for row in rows.rows.values()]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    print(f"{results}: {len(statuses)} rows: {counts}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        one(*map(Path, sys.argv[2:]))
    main()
