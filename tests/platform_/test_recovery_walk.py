"""The walks through the sources that the documents offer: every file they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "platform" / "elastrata"
PLACES = (
    ENGINE,
    ROOT / "pipelines" / "elastrata_pipelines",
    ROOT / "workloads" / "elastrata_workloads",
    ROOT,
)
_FILE = re.compile(r"`([\w/]+\.(?:py|md))`")


@pytest.mark.parametrize(
    "document",
    [ENGINE / "cluster" / "RECOVERY.md", ROOT / "CONTRIBUTING.md"],
    ids=lambda p: p.name,
)
def test_every_file_of_a_walk_is_there(document: Path) -> None:
    files = _FILE.findall(document.read_text(encoding="utf-8"))
    assert len(files) > 15
    missing = [f for f in files if not any((place / f).is_file() for place in PLACES)]
    assert missing == []


def test_every_folder_of_the_engine_is_in_the_table_of_the_house() -> None:
    told = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders = [path.parent.name for path in ENGINE.glob("*/__init__.py")]
    assert [name for name in folders if f"`{name}/`" not in told] == []
