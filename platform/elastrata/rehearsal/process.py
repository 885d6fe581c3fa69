"""The process of a rehearsal: a new one, because fake CUDA must be loaded before torch.

A small C++ library lets a process without a GPU run autograd on fake CUDA tensors. The machine's
own compiler compiles it at the first use, and it is kept in the user's cache. This module does not
import torch.
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
    """Load the library into this process, which from then on has fake CUDA devices.

    Raises:
        RuntimeError: torch is loaded already.
        UserError: there is no compiler, or it cannot compile the library.
    """
    if "torch" in sys.modules:
        raise RuntimeError("fake CUDA must be there before torch is: load it in a new process")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # real devices would get the requests for fake ones
    library = shim_library(_torch_folder())
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def shim_library(torch_folder: Path) -> Path:
    """Return the library for an installation of torch; compile it if it is not in the cache.

    Raises:
        UserError: there is no compiler, or it cannot compile the library.
    """
    version = (torch_folder / "version.py").read_bytes()
    # Everything that the binary depends on, so that an update of torch compiles it again.
    sources = str(torch_folder).encode() + version + _SOURCE.read_bytes()
    name = hashlib.sha256(sources).hexdigest()[:16]
    library = _cache() / f"fake_cuda-{name}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        _compile(torch_folder, library)
    return library


def _compile(torch_folder: Path, library: Path) -> None:
    """Compile the library."""
    # In a temporary folder first, so that no other process loads an incomplete file.
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
            errors="replace",  # compilers write in the machine's language and encoding
            check=False,
        )
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "")
            raise UserError(f"cannot compile a small library for the rehearsal: {reason}")
        built.replace(library)


def _compiler() -> str:
    named = os.environ.get("CXX")
    wanted = (named,) if named else ("g++", "clang++")
    if compiler := next(filter(None, map(shutil.which, wanted)), None):
        return compiler
    raise UserError(
        "no C++ compiler: a rehearsal compiles a small library and needs "
        f"{' or '.join(wanted)} on PATH"
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
    """Arguments of `elastrata rehearse`."""

    recipe: str
    """Name or file."""
    overrides: tuple[str, ...]
    """`dotted.path=value`."""
    cluster: str
    phase: int = 0
    graphs: bool = True
    """Whether to rehearse compilation, if the recipe compiles."""


def rehearse(request: Request) -> Mapping[str, Any]:
    """Return the figures of a rehearsal: the keys of `elastrata rehearse --json`.

    Raises:
        UserError: the recipe or cluster is invalid (one line for each reason), or there is no C++
            compiler.
        RuntimeError: the step fails; with the last line of its error.
    """
    done = subprocess.run(
        # The caller may have loaded torch already, and then fake CUDA would come too late.
        [sys.executable, "-m", "elastrata.rehearsal.process"],
        input=json.dumps(asdict(request)),
        capture_output=True,
        encoding="utf-8",
        errors="replace",  # libraries write in the machine's encoding
        check=False,
    )
    # The answer is the last line: libraries may print to standard output before it.
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
    """Rehearse the request on standard input and print the answer in JSON."""
    values = json.load(sys.stdin)
    request = Request(**{**values, "overrides": tuple(values["overrides"])})
    try:
        load_shim()
        from elastrata.rehearsal.rehearse import rehearse_request

        answer: dict[str, object] = {"figures": asdict(rehearse_request(request))}
    except UserError as error:
        answer = {"problems": list(error.problems)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
