"""Tests on a GPU within half an hour: correctness, speed and memory of the models.

    make gpu
    python benchmarks/gpu.py --results gpu.jsonl --minutes 10
    python benchmarks/gpu.py --device cpu --tiny

Runs a table of cases, most valuable first. It needs only PyTorch, the checkout and a few small
wheels (`make gpu-wheels`). Every case runs in its own process with its own time limit, and adds a
row to a JSON Lines file as soon as it ends. The row's `status` is `ok`, `wrong` (a result is
incorrect), `out of memory`, `timeout`, `crashed` or `failed`. The next call continues after the
last row; `--again` repeats cases that did not succeed. Among cases that differ only in activation
checkpointing, the first one that fits into memory counts.

Samples are random tokens. They have full length or natural lengths: those of English Wikipedia, or
drawn from the histogram of `--lengths` (docs/reference/commands.md). MFU counts half of the
attention FLOPs if attention is causal, and no recomputation; its peak is the device's dense bf16
peak.

`--device cpu --tiny` tests the table without a GPU and without compilation, with tiny models.
`--device fake` tests the speed cases with models of their real sizes, on tensors without values.

    python benchmarks/gpu.py --case REQUEST RESULT

is the process of one case: it reads the first file and writes the second.
"""

from __future__ import annotations

# Only Python's standard library at the top level, so that the script can report missing packages.
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
"""Folder for the packages that this machine lacks."""
# Neither Ray nor MLflow: the cases run the engine's loop without a driver.
NEEDED = {"numpy": "numpy", "fsspec": "fsspec", "pyarrow": "pyarrow", "yaml": "pyyaml"} | {
    name: name for name in ("pydantic", "tenacity")
}
"""Package names by module name; PyTorch is needed in addition."""


def installed(wheels: Path) -> Mapping[str, str]:
    """Install missing packages and return the environment variables of all cases.

    Missing packages are installed into a folder of the checkout: from the folder of wheels if it
    contains any, else from the package index.
    """
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"{sys.executable} has no PyTorch; PYTHON=... names another Python")
    sys.path.append(str(SITE))
    missing_packages = [package for module, package in NEEDED.items() if not _is_there(module)]
    if missing_packages:
        _install(missing_packages, wheels)
    if not list(importlib.metadata.distributions(name="elastrata")):
        _register()
    paths = [HERE, ROOT / "platform", ROOT / "pipelines", ROOT / "workloads", SITE]
    inherited_path = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join(
            [*map(str, paths), *([inherited_path] if inherited_path else [])]
        )
    }


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _install(packages: Sequence[str], wheels: Path) -> None:
    # Machines with GPUs often have no network.
    wheel_options = ["--no-index", "--find-links", str(wheels)] if any(wheels.glob("*.whl")) else []
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Into a separate folder, which leaves the machine's Python unchanged.
    constraints = ["-c", str(ROOT / "constraints.txt"), "--upgrade", "--target", str(SITE)]
    if subprocess.run([*command, *wheel_options, *constraints, *packages]).returncode:
        explanation = (
            f"{wheels} does not hold all of them" if wheel_options else f"{wheels} holds no wheels"
        )
        sys.exit(
            f"missing: {', '.join(packages)}; {explanation}: `make gpu-wheels`, with a network"
        )


def _register() -> None:
    """Write the metadata by which Python finds the checkout's workloads, as an installation
    would."""
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
"""Functions that work on tensors without values; all others compare numbers."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case to run, which becomes one row."""

    name: str
    function: str
    """`module:function`; its result, a dictionary, becomes part of the row."""
    seconds: float
    """Time limit, after which the process is killed."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the function, which also become part of the row."""
    instead_of: str = ""
    """Name of another case: this one runs only if that one ran out of memory."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the case's process, on a GPU only."""


def _fitting_cases(
    part: str, model: str, *overrides: str, seconds: float, **values: Any
) -> list[Case]:
    """Return cases for the steps of a model, with increasing activation checkpointing."""
    cases: list[Case] = []
    # Each runs only if the previous one ran out of memory.
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
# Correctness comes first: the speed of wrong results is meaningless.
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
    *_fitting_cases("speed", "gpt/125m", COMPILED, seconds=120, aim=0.40),
    *_fitting_cases("speed", "gpt/1.3b", COMPILED, seconds=150, aim=0.50),
    *_fitting_cases("speed", "bert/large", COMPILED, seconds=150, lengths=NATURAL, published=833),
    *_fitting_cases("speed", "gpt/760m", COMPILED, seconds=150, aim=0.45),
    *_fitting_cases("speed", "gpt/350m", COMPILED, seconds=120),
]
LARGE = [
    *_fitting_cases("speed", "gpt/7b", COMPILED, seconds=240, aim=0.52),
    *(
        case
        for model, sizes, lengths in (
            ("bert/large", (32768,), NATURAL),
            ("gpt/125m", (32768, 65536), "full"),
            ("gpt/1.3b", (4096, 16384, 32768), "full"),
        )
        for size in sizes
        for case in _fitting_cases(
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
        for case in _fitting_cases(
            "parameters kept",
            model,
            COMPILED,
            "parallel.reshard_after_forward=false",
            seconds=120,
            lengths=lengths,
        )
    ),
    *_fitting_cases("padded", "bert/large", COMPILED, seconds=120, lengths=NATURAL, padded=True),
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
        for case in _fitting_cases(
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
    *_fitting_cases("eager", "gpt/1.3b", EAGER, seconds=120),
    *_fitting_cases("speed", "bert/base", COMPILED, seconds=120, lengths=NATURAL),
    *_fitting_cases("full length", "bert/large", COMPILED, seconds=120),
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
    """Run a case in a new process and return its row.

    The process and all its children are killed in the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        request_path, result_path = Path(folder, "asked.json"), Path(folder, "told.json")
        values = {"function": case.function, "values": {**case.values, **options}}
        request_path.write_text(json.dumps(values), encoding="utf-8")
        with Path(folder, "output").open("w+b") as output:
            child = subprocess.Popen(
                [sys.executable, __file__, "--case", str(request_path), str(result_path)],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A new process group, so that `_kill` also reaches grandchildren, such as
                # compiler workers.
                process_group=0,
            )
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                return {"status": TIMEOUT, "error": f"not done after {seconds:.0f} s"}
            finally:
                _kill(child)
            if result_path.is_file():
                row: Row = json.loads(result_path.read_text(encoding="utf-8"))
                return row
            output.seek(0)
            return {"status": CRASHED, "error": _crash(code, output.read())}


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child process and its process group."""
    with contextlib.suppress(ProcessLookupError):
        # The child is not reaped yet, and the remaining members of the group keep its id in use, so
        # the id cannot belong to another process.
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _crash(code: int, output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"{how}: {' / '.join(lines)}"[:_SHOWN_CHARACTERS]


def one(asked: Path, told: Path) -> None:
    """Run one case in this process and write its row to `told`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with its parent
    request = json.loads(asked.read_text(encoding="utf-8"))
    module, function = request["function"].split(":")
    try:
        with _rehearse() if request["values"]["device"] == FAKE else contextlib.nullcontext():
            result = getattr(importlib.import_module(module), function)(**request["values"])
        row = {"status": OK if result.pop("is_right", True) else WRONG, **result}
    except Exception as error:
        text = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
        is_memory = type(error).__name__ == "OutOfMemoryError" or "out of memory" in text
        status = NO_MEMORY if is_memory else FAILED
        row = {"status": status, "error": f"{type(error).__name__}: {text}"}
    # Written and renamed, so that the parent never reads a partial row.
    unfinished = told.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(row), encoding="utf-8")
    unfinished.rename(told)
    sys.stdout.flush()
    os._exit(0)  # skips the exit handlers of libraries, which may hang or crash


@contextlib.contextmanager
def _rehearse() -> Iterator[None]:
    """Simulate a GPU whose tensors have shapes but no values."""
    shim = importlib.import_module("elastrata.rehearsal.process")
    shim.load_shim()
    session = importlib.import_module("elastrata.rehearsal.session")
    with session.rehearsal(world_size=None):
        yield


_LEAST_SECONDS = 20.0
"""Minimum remaining time to start a case, in seconds."""


class Rows:
    """Runs cases, each in a new process, and records their rows.

    Args:
        results: the JSON Lines file.
        minutes: total time limit; no case starts or continues after it.
        again: whether to repeat cases that did not succeed.
        options: additional arguments of every case's function.
        environment: additional environment variables of every case.
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
        """Run all cases that have no row yet, until the time is used up."""
        for case in cases:
            if self._is_done(case) or not self._is_wanted(case):
                continue
            seconds_left = self._end - time.monotonic()
            if seconds_left < min(_LEAST_SECONDS, case.seconds):
                print(f"no time is left: the same command goes on with {case.name!r}", flush=True)
                return
            self._add(case, min(seconds_left, case.seconds))

    def _is_done(self, case: Case) -> bool:
        row = self.rows.get(case.name)
        # Running out of memory is a result: repeating the case would not change it.
        return bool(row) and (not self._again or row["status"] in (OK, NO_MEMORY))

    def _is_wanted(self, case: Case) -> bool:
        before = self.rows.get(case.instead_of, {})
        return not case.instead_of or before.get("status") == NO_MEMORY

    def _add(self, case: Case, seconds: float) -> None:
        start_time = time.monotonic()
        on_gpu = case.environment if self._options["device"] == "cuda" else {}
        result = apart(case, seconds, self._options, {**self._environment, **on_gpu})
        # The total time limit ended the case, not its own one.
        if result["status"] == TIMEOUT and seconds < case.seconds:
            print(f"no time is left for {case.name!r}", flush=True)
            return  # without a row, so that the next call runs it again
        about = {"case": case.name, **case.values}
        row = {**about, **result, "case_seconds": round(time.monotonic() - start_time, 1)}
        append(self._results, row)
        self.rows[case.name] = row
        print(json.dumps(_summarise(row)), flush=True)


def read_rows(results: Path) -> Iterator[Row]:
    """Yield the rows of a file; an incomplete last line is ignored."""
    text = results.read_text(encoding="utf-8") if results.is_file() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def append(results: Path, row: Row) -> None:
    """Append a row on a new line and sync it to disk."""
    with results.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            # A previous call was killed while writing: its incomplete line is removed.
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        # A row must survive a sudden end of the machine.
        os.fsync(file.fileno())


def _summarise(row: Row) -> Row:
    """Return the part of a row that is printed."""
    rates = ("sequences_per_second", "tokens_per_second", "mfu")
    rates_shown = {key: row[key]["median"] for key in rates if row.get(key)}
    kept_keys = (
        "case",
        "status",
        "error",
        "allocated_bytes",
        "plan_allocated_bytes",
        "case_seconds",
    )
    return {key: row[key] for key in kept_keys if key in row} | rates_shown


LENGTHS = ROOT / "tests" / "data" / "wikipedia_lengths_512.json"
"""Histogram of natural sample lengths, from English Wikipedia; the file names its source."""


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
        # Hides the GPUs, so that the engine selects the CPU.
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
