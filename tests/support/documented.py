"""What docs/commands.md promises."""

from __future__ import annotations

import re
from pathlib import Path

COMMANDS = Path(__file__).parents[2] / "docs" / "commands.md"


def documented_keys(command: str) -> list[str]:
    """The JSON keys that the document gives a command."""
    section = COMMANDS.read_text().split(f"### {command}\n")[1].split("\n#")[0]
    return re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
