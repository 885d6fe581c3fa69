"""The process of a rehearsal: a new one, as fake CUDA must be there before torch is.

A small library in C++ lets a process without a GPU run autograd on fake CUDA tensors. It is
compiled with the machine's own compiler at its first use and kept in the user's cache. This module
imports no torch: the library must be in the process before torch is.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastrata_pipelines.errors import UserError

_SOURCE = Path(__file__).with_name("guard.cpp")
_STANDARD = "-std=c++20"


def load_shim() -> None:
    """Puts the library into this process, which has CUDA devices from then on: fake ones.

    Raises:
        RuntimeError: torch is in the process already.
        UserError: there is no compiler, or it cannot compile the library.
    """
    if "torch" in sys.modules:
        raise RuntimeError("fake CUDA must be there before torch is: load it in a new process")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # real ones would be asked for what is fake
    library = shim(_torch_folder())
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def shim(torch_folder: Path) -> Path:
    """The library for a version of torch; compiled where it is not in the cache.

    Raises:
        UserError: there is no compiler, or it cannot compile the library.
    """
    version = (torch_folder / "version.py").read_bytes()
    made_of = str(torch_folder).encode() + version + _SOURCE.read_bytes()
    name = hashlib.sha256(made_of).hexdigest()[:16]
    library = _cache() / f"fake_cuda-{name}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        _compile(torch_folder, library)
    return library


def _compile(torch_folder: Path, library: Path) -> None:
    """Next to its place first, so that no other process loads a part of it."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        include, libraries = torch_folder / "include", torch_folder / "lib"
        done = subprocess.run(
            [
                *[_compiler(), "-O1", "-shared", "-fPIC", _STANDARD, str(_SOURCE)],
                *[f"-I{include}", f"-I{include}/torch/csrc/api/include"],
                *[f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"],
                *["-o", str(built)],
            ],
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # compilers speak the machine's language, in its encoding
            check=False,
        )
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "")
            raise UserError(f"a rehearsal compiles a small library, which failed: {reason}")
        built.replace(library)


def _compiler() -> str:
    named = os.environ.get("CXX")
    wanted = (named,) if named else ("g++", "clang++")
    if compiler := next(filter(None, map(shutil.which, wanted)), None):
        return compiler
    raise UserError(
        f"a rehearsal compiles a small library, and needs {' or '.join(wanted)}: expected a C++ "
        "compiler on the path"
    )


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "elastrata"


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be rehearsed, as it is typed."""

    recipe: str
    """Name or file."""
    overrides: tuple[str, ...]
    """`dotted.path=value`."""
    cluster: str
    phase: int = 0
    graphs: bool = True
    """Whether compilation is rehearsed, too, where the recipe compiles."""


def rehearse(request: Request) -> Mapping[str, Any]:
    """The figures of a rehearsal: the keys of `elastrata rehearse --json`.

    Raises:
        UserError: recipe or cluster cannot work, or there is no C++ compiler; a line each.
        RuntimeError: the step does not run; with the last line of what went wrong.
    """
    done = subprocess.run(
        [sys.executable, "-m", "elastrata.rehearsal.process"],
        input=json.dumps(asdict(request)),
        capture_output=True,
        encoding="utf-8",
        errors="replace",  # what libraries say has the machine's encoding
        check=False,
    )
    lines = done.stdout.splitlines()
    answer: Mapping[str, Any] = json.loads(lines[-1]) if lines and done.returncode == 0 else {}
    if "problems" in answer:
        raise UserError(*answer["problems"])
    if "figures" not in answer:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        error = RuntimeError(f"the step does not run: {said[-1] if said else done.returncode}")
        error.add_note(done.stderr)
        raise error
    figures: Mapping[str, Any] = answer["figures"]
    return figures


def main() -> None:
    """Reads the request from standard input."""
    values = json.load(sys.stdin)
    request = Request(**{**values, "overrides": tuple(values["overrides"])})
    try:
        load_shim()
        from elastrata.rehearsal.rehearse import figures

        answer: dict[str, object] = {"figures": asdict(figures(request))}
    except UserError as error:
        answer = {"problems": list(error.problems)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
