"""Modules of the user's folder that hide a module which Ray's workers need.

Ray puts the driver's current folder, and the folder of its script, before all others in the search
path of the workers. A `torch.py` there is imported in the place of PyTorch: workers fail at their
start, again and again, and nothing names the file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.machinery import (
    BuiltinImporter,
    FrozenImporter,
    ModuleSpec,
    PathFinder,
    all_suffixes,
)
from pathlib import Path

from elastrata_pipelines.errors import UserError

_OWN = "elastrata"
_ENDINGS = tuple(all_suffixes())


def check_search_path() -> None:
    """Check that no module of the current folder or the script's hides one that workers need.

    Raises:
        UserError: one line for each such module.
    """
    folders = dict.fromkeys(_searched_first())
    if problems := [line for folder in folders for line in _find_problems(folder)]:
        raise UserError(*problems)


def _searched_first() -> Iterator[str]:
    """Yield the folders that Ray puts first, chosen as Ray chooses them."""
    with suppress(OSError):  # the current folder is gone
        yield str(Path.cwd())
    with suppress(OSError):
        script = str(Path(os.path.realpath(sys.argv[0])).parent)
        if script in sys.path:
            yield script


def _find_problems(folder: str) -> Iterator[str]:
    """Yield one line for each module in a folder that hides another one."""
    others = [os.path.realpath(place) for place in sys.path[1:] if place]
    # PYTHONPATH or the installation names the folder, so its modules are meant.
    if folder in others:
        return
    for name in sorted(_names(folder)):
        here, other = PathFinder.find_spec(name, [folder]), PathFinder.find_spec(name, others)
        # A folder without __init__.py has no origin, and hides nothing.
        if here is None or not here.has_location or other is None or not other.has_location:
            continue
        if _comes_before_folders(name):
            continue
        if name in sys.stdlib_module_names:
            hidden = f"Python's own {name}"
        elif (package := _find_package(name, other)) is not None:
            hidden = f"the installed {name} ({package})"
        else:
            continue
        yield (
            f"{here.origin}: hides {hidden} from Ray's workers, which import from this "
            "folder first; rename it, or start from another folder"
        )


def _names(folder: str) -> set[str]:
    """Return the possible names of modules in a folder."""
    with suppress(OSError):  # the folder is gone, or unreadable
        # Not files of data, of which there may be a million.
        names = {
            entry.name.partition(".")[0]
            for entry in os.scandir(folder)
            if entry.name.endswith(_ENDINGS) or entry.is_dir()
        }
        return {name for name in names if name.isidentifier()}
    return set()


def _comes_before_folders(name: str) -> bool:
    """Return True for a module that Python has in itself, as `sys` and `os`."""
    return bool(BuiltinImporter.find_spec(name) or FrozenImporter.find_spec(name))


def _find_package(name: str, found: ModuleSpec) -> str | None:
    """Return the package with the module, if Elastrata needs that; else None."""
    needed = _needed_packages()
    # An installation of a checkout lists no modules.
    owners = [_OWN] if name.startswith(_OWN) else _packages_by_module().get(name, [])
    # Without metadata, Elastrata is not installed: any other module may be needed.
    if not needed:
        return next(iter(owners), Path(found.origin or name).parent.name)
    return next((owner for owner in owners if _normalize(owner) in needed), None)


@cache
def _packages_by_module() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())


@cache
def _needed_packages() -> frozenset[str]:
    """Return the normalized names of Elastrata's package, its dependencies, and theirs."""
    from packaging.requirements import Requirement

    found: set[tuple[str, str]] = set()
    pending = [(_OWN, "")]
    while pending:
        package, extra = pending.pop()
        with suppress(metadata.PackageNotFoundError):
            lines = metadata.requires(package) or []
            found.add((_normalize(package), extra))
            for requirement in map(Requirement, lines):
                if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                    wanted = {(requirement.name, name) for name in {"", *requirement.extras}}
                    pending += [one for one in wanted if (_normalize(one[0]), one[1]) not in found]
    return frozenset(package for package, _ in found)


def _normalize(package: str) -> str:
    return package.replace("_", "-").lower()
