"""The sidebar, generated from the lists of links in the Markdown; and links to files that are no pages.

Each heading of a page of :data:`LISTS` with links to pages below it becomes a part of the sidebar. The list of the
home page is also the site's ``llms.txt``. Links to other files, like an example or a package's README, lead to the
repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

REPOSITORY = "https://github.com/lightning-streaming/lightning-streaming/blob/main"
LISTS = ("index", "decisions/README", "api/README")
"""Pages whose links are the sidebar."""
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_LISTED = re.compile(r"^(?:- |\| )\[([^\]]+)\]\((?!\w+:)([^)#]+)\.md\)(.*)$", re.MULTILINE)
"""An entry of a list, or a row of a table: name, page, and the rest of the line."""
_LINK = re.compile(r"(?<=\]\()(?![\w+]+:|#)([^)#\s]+)(?=[)#])")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("build-finished", _write_llms_txt)
    return {"parallel_read_safe": True}


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    root = Path(app.srcdir)
    source[0] = with_repository_links(source[0], (root / page).parent, root)
    if page in LISTS:
        source[0] += "".join(sidebar(source[0]))


def sidebar(text: str) -> Iterator[str]:
    """Yield a hidden table of contents for each heading of a page with a list, or table, of pages below it."""
    parts = _HEADING.split(text)
    for caption, below in zip(["", *parts[1::2]], parts[::2], strict=True):
        # Instead of a number, show the page's own title.
        pages = [page if name.isdecimal() else f"{name} <{page}>" for name, page, _ in _LISTED.findall(below)]
        if pages:
            title = f":caption: {caption}\n" if caption else ""
            yield "\n\n```{toctree}\n:hidden:\n" + title + "\n" + "\n".join(pages) + "\n```\n"


def _write_llms_txt(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        text = llms_txt((Path(app.srcdir) / "index.md").read_text(), app.config.html_baseurl)
        (Path(app.outdir) / "llms.txt").write_text(text)


def llms_txt(index: str, site: str) -> str:
    """Return the text for language models, as llmstxt.org has it: title, summary, and the pages of each heading."""
    top, *parts = _HEADING.split(index)
    title, summary = (" ".join(paragraph.split()) for paragraph in top.split("\n\n")[:2])
    lines = [title, "", f"> {summary}"]
    for caption, below in zip(parts[::2], parts[1::2], strict=True):
        pages = _LISTED.findall(below)
        if pages:
            lines += ["", f"## {caption}", ""]
            lines += [f"- [{name}]({site}{page}.html){description}" for name, page, description in pages]
    return "\n".join(lines) + "\n"


def with_repository_links(text: str, directory: Path, root: Path) -> str:
    """Return the text with links to files that are no pages pointed to the repository; links to no file stay."""

    def resolved(link: re.Match[str]) -> str:
        target = (directory / link[1]).resolve()
        if (root in target.parents and target.suffix in (".md", ".png")) or not target.exists():
            return link[1]
        return f"{REPOSITORY}/{target.relative_to(root.parent).as_posix()}"

    return _LINK.sub(resolved, text)
