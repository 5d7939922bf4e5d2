"""The part of the metadata that cannot be written down: the README as a package index shows it.

In a checkout its links lead from file to file. Beside a package there are no such files, so there they lead to those
of the project's page, which ``pyproject.toml`` names.
"""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
_LINK = re.compile(r"(\]\()(?!https?://|#)([^)\s]+)")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def published_readme() -> str:
    """The README with links that lead somewhere from anywhere."""
    page = re.search(r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert page is not None, "pyproject.toml names the project's page as Source, under project.urls"
    # Code between fences is no link, and is left as it is.
    parts = _FENCE.split((ROOT / "README.md").read_text(encoding="utf-8"))
    parts[::2] = [_LINK.sub(rf"\g<1>{page[1]}/blob/main/\g<2>", part) for part in parts[::2]]
    return "".join(parts)


setup(long_description=published_readme(), long_description_content_type="text/markdown")
