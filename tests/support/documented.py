"""What the documents promise: command lines, and the keys of what they print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = ROOT / "docs" / "reference" / "commands.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
GUIDES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "cluster_configs" / "README.md",
    *sorted((ROOT / "workloads" / "notebooks").glob("*.py")),
]
"""What tells people which commands to type."""
PROGRAMS = {"elastrata", "jupytext", "make", "mlflow", "pip", "python", "python3", "ray", "uv"}
_NAME = re.compile(r"(elastrata|ray)( [a-z][a-z-]*){1,2}( --json)?")
"""A command's name in a sentence, not a line to type."""


def documented_keys(command: str) -> list[str]:
    """The JSON keys that the document gives a command."""
    section = COMMANDS.read_text(encoding="utf-8").split(f"### {command}\n")[1].split("\n#")[0]
    items = re.findall(r"^- ((?:`\w+`(?:, |,\n  )?)+)(?::|$)", section, flags=re.MULTILINE)
    return [key for item in items for key in re.findall(r"`(\w+)`", item)]


def documented_lines(guides: Iterable[Path] = tuple(GUIDES)) -> list[str]:
    """Every command line of the guides, without its comment: the lines of shell blocks, and those
    in sentences, which may have placeholders."""
    lines: list[str] = []
    for path in guides:
        text = path.read_text(encoding="utf-8")
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            lines += _whole(block.splitlines())
        for block in re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            prompts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
            lines += [next(_whole(prompt.splitlines())) for prompt in prompts]
        lines += [line for line in _in_sentences(text) if not _NAME.fullmatch(line)]
    return list(dict.fromkeys(lines))


def documented_names() -> set[str]:
    """The commands that sentences name."""
    texts = [path.read_text(encoding="utf-8") for path in GUIDES]
    return {line for text in texts for line in _in_sentences(text) if _NAME.fullmatch(line)}


def _whole(lines: Iterable[str]) -> Iterator[str]:
    """Lines as the shell takes them: with their continuations, without their comments."""
    begun = ""
    for line in lines:
        begun += line
        if begun.endswith("\\"):
            begun = begun[:-1]
        elif _is_open(begun):
            begun += "\n"
        else:
            whole = re.sub(r"(^|\s+)#\s.*", "", begun)
            if whole:
                yield whole if "\n" in whole else " ".join(whole.split())
            begun = ""


def _is_open(line: str) -> bool:
    """Whether a quotation goes on in the next line."""
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


def _in_sentences(text: str) -> Iterator[str]:
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", outside):
        line = " ".join(span.split())
        program, _, arguments = line.partition(" ")
        if program in PROGRAMS and arguments:
            yield line
