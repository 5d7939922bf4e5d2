"""Build the site of the working tree, and under it that of each release: ``python -m docs._ext.versions OUT``.

A page of 0.1.0 is then at ``/0.1.0/resume.html`` of the site, and the newest text at ``/resume.html``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
_SPHINX = (sys.executable, "-m", "sphinx", "-b", "html", "-E", "-q")


def released(root: Path) -> Iterator[str]:
    """Yield the versions that have a tag, such as ``0.1.0``."""
    listed = subprocess.run(["git", "tag", "--list"], cwd=root, capture_output=True, text=True, check=True)
    for tag in listed.stdout.split():
        if re.fullmatch(r"v\d+\.\d+\.\d+", tag):
            yield tag[1:]


def build_versions(root: Path, out: Path) -> None:
    """Build all sites.

    Raises:
        subprocess.CalledProcessError: The site of this commit has a warning, or that of a release cannot be built.
    """
    subprocess.run([*_SPHINX, "-W", "--keep-going", root / "docs", out], cwd=root, check=True)
    for version in released(root):
        with TemporaryDirectory() as directory:
            tree = Path(directory) / "tree"
            subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, f"v{version}"], cwd=root, check=True)
            try:  # -W is left out: a newer Sphinx may warn about pages that cannot change any more
                subprocess.run([*_SPHINX, tree / "docs", (out / version).resolve()], cwd=tree, check=True)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=root, check=True)


if __name__ == "__main__":
    build_versions(ROOT, Path(sys.argv[1]).resolve())
