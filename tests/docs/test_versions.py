"""The site keeps the pages of each release, next to those of the newest commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from docs._ext.versions import build_versions, released


def git(root: Path, *words: str) -> str:
    user = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    return subprocess.run(["git", *user, *words], cwd=root, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository whose page changed after its release."""
    root = tmp_path / "project"
    (root / "docs").mkdir(parents=True)
    (root / "docs" / "conf.py").write_text('project = "p"\n')
    git(tmp_path, "init", "--quiet", str(root))
    for text, tag in (("Released text", "v0.1.0"), ("Another mark", "old"), ("Newest text", None)):
        (root / "docs" / "index.rst").write_text(f"{text}\n{'=' * len(text)}\n")
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "--message", text)
        if tag:
            git(root, "tag", tag)
    return root


@pytest.mark.nightly
def test_each_release_keeps_its_pages_and_nothing_is_left_in_the_clone(project: Path, tmp_path: Path) -> None:
    assert list(released(project)) == ["0.1.0"]
    build_versions(project, tmp_path / "out")
    assert "Newest text" in (tmp_path / "out" / "index.html").read_text()
    assert "Released text" in (tmp_path / "out" / "0.1.0" / "index.html").read_text()
    assert not (tmp_path / "out" / "old").exists()
    assert len(git(project, "worktree", "list").splitlines()) == 1
    assert git(project, "status", "--porcelain") == ""


@pytest.mark.nightly
def test_a_warning_in_the_newest_pages_fails_but_not_in_those_of_a_release(project: Path, tmp_path: Path) -> None:
    page = project / "docs" / "index.rst"
    page.write_text(page.read_text() + "\n:doc:`missing`\n")
    git(project, "commit", "--quiet", "--all", "--message", "A broken link")
    git(project, "tag", "v0.2.0")
    with pytest.raises(subprocess.CalledProcessError):
        build_versions(project, tmp_path / "broken")
    git(project, "revert", "--no-edit", "HEAD")
    build_versions(project, tmp_path / "out")
    assert (tmp_path / "out" / "0.2.0" / "index.html").exists()
