"""Additions to mkdocs: files outside docs/ that pages link to, and a check of the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(?<=\]\()(?!https?://|#)([^)#\s]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add every file of the repository that a page links to, directly or through another one."""
    pages = [DOCS / file.src_uri for file in files.documentation_pages()]
    pages += [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    while pages:
        page = pages.pop()
        found = {page} | {
            _target(page, link) for link in _LINK.findall(page.read_text(encoding="utf-8"))
        }
        for path in sorted(path for path in found if path.is_file()):
            if files.get_file_from_path(_uri(path)) is None:
                files.append(File.generated(config, _uri(path), abs_src_path=str(path)))
                pages += [path] if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Point links to where the site has their targets."""
    source = Path(page.file.abs_src_path or "")
    folder = Path(page.file.src_uri).parent
    return _LINK.sub(lambda link: os.path.relpath(_uri(_target(source, link[0])), folder), markdown)


def on_post_page(output: str, *, page: Page, config: Any) -> str:
    """Refuse a page that loads anything from a server: the site works without a network."""
    if remote := re.search(
        r'<(script|img|link rel="stylesheet")[^>]* (src|href)="https?:[^>]*>', output
    ):
        raise PluginError(f"{page.file.src_uri}: {remote[0]}")
    return output


def _target(page: Path, link: str) -> Path:
    """Return the file that a link in a page of the repository means."""
    return Path(os.path.normpath(page.parent / link))


def _uri(path: Path) -> str:
    """Return the place of a file in the site's sources."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"repository/{path.relative_to(ROOT).as_posix()}"
