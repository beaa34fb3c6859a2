"""What mkdocs does beside its own: the pages that lie outside of docs/, and the generated ones.

README, CONTRIBUTING and CHANGELOG are pages of the site as well. A link that leaves the site, to a
file of the sources, is shown as the file's name.
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import reference

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the repository that are pages, and what they are called there."""


GENERATED = {
    "recipe": reference.recipe_page,
    "commands": reference.commands_page,
    "results": lambda: "\n".join(reference.results()),
}
"""What stands in the place of `<!-- generated: NAME -->`."""

_LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of docs/."""
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in what is generated, and lead links to where the site has their pages."""
    uri = page.file.src_uri
    outside = {page: name for name, page in OUTSIDE.items()}
    source = outside.get(uri, f"docs/{uri}")

    def moved(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if target.startswith("docs/"):
            place = target.removeprefix("docs/")
        elif target in OUTSIDE:
            place = OUTSIDE[target]
        else:
            return text
        return f"[{text}]({posixpath.relpath(place, posixpath.dirname(uri) or '.')}{anchor})"

    for name, make in GENERATED.items():
        mark = f"<!-- generated: {name} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return _LINK.sub(moved, markdown)
