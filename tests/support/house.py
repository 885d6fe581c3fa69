"""Print the size of each folder of the project, its largest files, and names that repeat.

`make house` runs it; `tests/platform_/test_house.py` holds the limits.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "engine": "platform/elastrata",
    "pipelines": "pipelines/elastrata_pipelines",
    "workloads": "workloads",
    "tests": "tests",
    "benchmarks": "benchmarks",
}


def count_lines(folder: str) -> dict[Path, int]:
    """Return the lines of each Python file below `folder` that git knows or does not ignore."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"{folder}/*.py"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    # A file that is deleted but not yet committed is still listed.
    files = (ROOT / line for line in listing.stdout.splitlines())
    return {
        file.relative_to(ROOT): file.read_text(encoding="utf-8").count("\n")
        for file in files
        if file.exists()
    }


def main() -> None:
    """Print one table of the project's folders, and one of the engine's."""
    engine = count_lines(FOLDERS["engine"])
    below: Counter[str] = Counter()
    lines_below: Counter[str] = Counter()
    for file, lines in engine.items():
        folder = "/".join(file.parts[2:-1]) or "."
        below[folder] += 1
        lines_below[folder] += lines
    rows = [(name, count_lines(folder).values()) for name, folder in FOLDERS.items()]
    for name, sizes in rows:
        print(f"{name:24} {len(sizes):4} files {sum(sizes):7,} lines")
    print()
    for folder in sorted(below):
        print(f"engine/{folder:17} {below[folder]:4} files {lines_below[folder]:7,} lines")
    print("\nlargest:", *(f"{n:,} {file}" for n, file in largest(engine)), sep="\n  ")
    names = Counter(file.name for file in engine if file.name != "__init__.py")
    print("\nnames that repeat:", *(f"{n} x {name}" for name, n in names.items() if n > 1))


def largest(files: dict[Path, int], count: int = 5) -> list[tuple[int, Path]]:
    """Return the `count` largest files with their lines, the largest first."""
    return sorted(((lines, file) for file, lines in files.items()), reverse=True)[:count]


if __name__ == "__main__":
    main()
