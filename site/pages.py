"""The pages of the site that are not in docs/: the README, CONTRIBUTING, and what docstrings say.

What belongs here: mkdocs' hooks that make these pages, and mend links that are right in the
repository and not on the site. What does not: any text of a page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import archipel
from archipel import methods

ROOT = Path(__file__).parent.parent
COPIED = {"index.md": ROOT / "README.md", "contributing.md": ROOT / "CONTRIBUTING.md"}
LINKS = {
    r"\]\(docs/": "](",
    r"\]\((?:\.\./)?README\.md": "](index.md",
    r"\]\((?:\.\./)?CONTRIBUTING\.md": "](contributing.md",
    r"\[([^]]*)\]\(CITATION\.cff\)": r"\1",
}
"""What a link looks like in the repository, and on the site."""


def on_config(config: Any) -> Any:
    """Name the pages of the methods."""
    for entry in config.nav:
        if "Methods" in entry:
            entry["Methods"] = [{name: f"methods/{name}.md"} for name in methods.names()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    pages = {page: path.read_text(encoding="utf-8") for page, path in COPIED.items()}
    for name in methods.names():
        pages[f"methods/{name}.md"] = f"# {name}\n\n::: archipel.methods.{name}\n"
    names = [name for name in archipel.__all__ if not name.startswith("_")]
    described = "\n\n".join(f"::: {_place(name)}" for name in names)
    pages["reference.md"] = f"# Python reference\n\n{described}\n"
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Mend links."""
    for here, there in LINKS.items():
        markdown = re.sub(here, there, markdown)
    return markdown


def _place(name: str) -> str:
    """Where something that `archipel` exports is defined."""
    exported = getattr(archipel, name)
    return f"{exported.__module__}.{name}"
