"""The README beside a published package: it is that of the checkout, and its links lead to the project's page."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from email.parser import Parser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_BUILD = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('built'))"


def links(text: str) -> list[str]:
    return _LINK.findall(_FENCE.sub("", text))


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What an installer and an index are told, by field."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    (root / "lightning_streaming").mkdir()
    (root / "lightning_streaming" / "__init__.py").touch()
    (root / "built").mkdir()
    done = subprocess.run([sys.executable, "-c", _BUILD], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = root.glob("built/*.dist-info/METADATA")
    told = Parser().parsestr(file.read_text(encoding="utf-8"))
    return {**{name: told.get_all(name, []) for name in told}, "text": [told.get_payload()]}  # type: ignore[list-item]


def test_no_link_of_the_published_description_is_relative(metadata: dict[str, list[str]]) -> None:
    (text,) = metadata["text"]
    assert metadata["Description-Content-Type"] == ["text/markdown"]
    assert len(links(text)) == len(links((ROOT / "README.md").read_text())) > 10
    assert [link for link in links(text) if not urlsplit(link).scheme] == []


def test_each_leads_to_a_file_of_the_checkout(metadata: dict[str, list[str]]) -> None:
    pages = dict(one.split(", ", 1) for one in metadata["Project-URL"])
    files = f"{pages['Source']}/blob/main/"
    paths = [link.removeprefix(files) for link in links(metadata["text"][0]) if link.startswith(files)]
    assert paths == [link for link in links((ROOT / "README.md").read_text()) if not urlsplit(link).scheme]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert all(page.startswith(pages["Source"]) for page in pages.values())


def test_all_else_is_the_readme_as_it_is(metadata: dict[str, list[str]]) -> None:
    def without_links(text: str) -> str:
        return _LINK.sub("]()", text).strip()

    assert without_links(metadata["text"][0]) == without_links((ROOT / "README.md").read_text())
