"""The small library in C++ that lets a process without a GPU run autograd on fake CUDA tensors.

It is compiled with the machine's own compiler at its first use and kept in the user's cache. This
module imports no torch: the library must be in the process before torch is.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

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

    Args:
        torch_folder: where torch is installed.

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
