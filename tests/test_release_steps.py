"""The checklist of a release passes for a complete one, and reports each step that is left out."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, which
from zipfile import ZipFile

import pytest

from tests.release import PACKAGE, SIGNERS, main, version_of

ROOT = Path(__file__).parents[1]
VERSION = version_of(ROOT)
TAG = f"v{VERSION}"
DATE = "2026-12-01"

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the files of a release are those that git has")


def run(root: Path, *words: object) -> str:
    return subprocess.run([*map(str, words)], cwd=root, capture_output=True, text=True, check=True).stdout


def replace(path: Path, pattern: str, text: str) -> None:
    changed, count = re.subn(pattern, text, path.read_text(), flags=re.MULTILINE)
    assert count
    path.write_text(changed)


def commit(root: Path) -> None:
    run(root, "git", "add", "--all")
    run(root, "git", "commit", "--quiet", "--allow-empty", "--message", "Release")


def key(root: Path, name: str) -> Path:
    if which("ssh-keygen") is None:
        pytest.skip("tags are signed with ssh-keygen of OpenSSH, which is not installed")
    run(root, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", root / ".git" / name)
    return root / ".git" / name


def sign(root: Path, with_key: Path) -> None:
    run(root, "git", "config", "user.signingkey", with_key)
    run(root, "git", "tag", "--sign", "--force", "--message", "Release", TAG)


def build(root: Path) -> None:
    """Write files like those of ``make dist`` and ``make sbom`` next to the clone."""
    out = root.parent / "dist"
    out.mkdir(exist_ok=True)
    (out / f"{PACKAGE}-{VERSION}.tar.gz").touch()
    with ZipFile(out / f"{PACKAGE}-{VERSION}-py3-none-any.whl", "w") as wheel:
        for name in run(root, "git", "ls-files", PACKAGE).splitlines():
            if not name.endswith(".md"):
                wheel.write(root / name, name)
    (root.parent / "sbom").mkdir(exist_ok=True)
    parts = [{"name": "lightning-streaming", "version": VERSION}, {"name": "torch", "version": "2.13.0"}]
    (root.parent / "sbom" / f"{PACKAGE}-{VERSION}.cdx.json").write_text(json.dumps({"components": parts}))


def release(source: Path, root: Path, date: str) -> Path:
    """Clone a repository, whether its version is released or not, and do every step of a release in the clone."""
    run(source, "git", "clone", "--quiet", "--no-hardlinks", source, root)
    for name in run(source, "git", "ls-files", "--modified").splitlines():
        if (source / name).is_file():
            (root / name).write_bytes((source / name).read_bytes())
    for name, value in (("name", "A"), ("email", "a@example.com")):
        run(root, "git", "config", f"user.{name}", value)
    run(root, "git", "config", "gpg.format", "ssh")
    changelog, citation = root / "CHANGELOG.md", root / "CITATION.cff"
    changelog.write_text(re.sub(r"^## .+$", f"## {VERSION} - {date}", changelog.read_text(), count=1, flags=re.M))
    undated = re.sub(r"^date-released:.*\n", "", citation.read_text(), flags=re.M)
    citation.write_text(f"{undated}date-released: {date}\n")
    for name in ("README.md", "docs/install.md", "docs/stability.md"):
        page = root / name
        page.write_text(re.sub(r"is\s+not\s+(out|released)\s+yet", "is the newest", page.read_text()))
    maintainer = key(root, "maintainer")
    public = maintainer.with_suffix(".pub").read_text()
    (root / SIGNERS).write_text(f"a@example.com {public}")
    commit(root)
    sign(root, maintainer)
    build(root)
    return root


@pytest.fixture(scope="module")
def from_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this repository in which every step of a release is done."""
    return release(ROOT, tmp_path_factory.mktemp("from_here") / "clone", "2026-11-30")


@pytest.fixture(scope="module")
def released(from_here: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, made from a released tree: publish.yml runs these tests on the commit of the tag."""
    return release(from_here, tmp_path_factory.mktemp("release") / "clone", DATE)


def forget_version(root: Path) -> None:
    replace(root / PACKAGE / "__init__.py", r'^__version__ = ".+"$', '__version__ = "0.9.0rc1"')


def forget_changelog(root: Path) -> None:
    replace(root / "CHANGELOG.md", rf"^## {re.escape(VERSION)} - .*$", "## Unreleased")


def forget_date(root: Path) -> None:
    replace(root / "CITATION.cff", r"^date-released:.*\n", "")


def forget_citation(root: Path) -> None:
    replace(root / "CITATION.cff", r"^version:.*$", "version: 0.0.9")


def forget_readme(root: Path) -> None:
    with (root / "README.md").open("a") as page:
        page.write("The release is not out\nyet.\n")


def forget_signers(root: Path) -> None:
    (root / SIGNERS).unlink()


FILES: list[tuple[Callable[[Path], None], str]] = [
    (forget_version, "set it to three numbers"),
    (forget_changelog, f"write '## {VERSION} - YYYY-MM-DD'"),
    (forget_date, f"write {DATE}"),
    (forget_citation, f"write {VERSION}"),
    (forget_readme, "README.md says that the release is not out yet"),
    (forget_signers, "add the public key"),
]


def forget_commit(root: Path) -> None:
    (root / "new.txt").touch()


def forget_to_commit_a_change(root: Path) -> None:
    with (root / "README.md").open("a") as page:
        page.write("More.\n")


def forget_to_raise_the_version(root: Path) -> None:
    run(root, "git", "commit", "--quiet", "--allow-empty", "--message", "After the release")


def forget_tag(root: Path) -> None:
    run(root, "git", "tag", "--delete", TAG)


def forget_signature(root: Path) -> None:
    run(root, "git", "tag", "--force", "--message", "Release", TAG)


def sign_as_a_stranger(root: Path) -> None:
    sign(root, key(root, "stranger"))


def forget_build(root: Path) -> None:
    wheel = root.parent / "dist" / f"{PACKAGE}-{VERSION}-py3-none-any.whl"
    with ZipFile(wheel, "a") as file:
        file.writestr(f"{PACKAGE}/left_over.py", "")


def forget_sdist(root: Path) -> None:
    (root.parent / "dist" / f"{PACKAGE}-{VERSION}.tar.gz").unlink()


def forget_sbom(root: Path) -> None:
    (root.parent / "sbom" / f"{PACKAGE}-{VERSION}.cdx.json").unlink()


def keep_an_old_sbom(root: Path) -> None:
    path = root.parent / "sbom" / f"{PACKAGE}-{VERSION}.cdx.json"
    path.write_text(path.read_text().replace(VERSION, "0.0.9"))


OTHERS: list[tuple[Callable[[Path], None], str]] = [
    (forget_commit, "1 files are not committed, such as new.txt"),
    (forget_to_commit_a_change, "1 files are not committed, such as README.md"),
    (forget_to_raise_the_version, "raise __version__"),
    (forget_tag, f"git tag --sign {TAG}"),
    (forget_signature, f"git tag --sign --force {TAG}"),
    (sign_as_a_stranger, f"git tag --sign --force {TAG}"),
    (forget_build, f"not those of the commit, such as {PACKAGE}/left_over.py"),
    (forget_sdist, "make dist"),
    (forget_sbom, "make sbom"),
    (keep_an_old_sbom, "make sbom"),
]


def missing(root: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the steps that the checklist reports, with the tag and the built files."""
    capsys.readouterr()
    words = ["--tag", TAG, "--dist", str(root.parent / "dist"), "--sbom", str(root.parent / "sbom")]
    status = main(words, root)
    lines = capsys.readouterr().out.splitlines()
    assert status == len(lines)
    return lines


@pytest.mark.parametrize("name", ["from_here", "released"])
def test_a_complete_release_lacks_nothing(
    name: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert missing(request.getfixturevalue(name), capsys) == []


@pytest.mark.parametrize(("forget", "report"), FILES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_step_in_files_that_is_left_out_is_reported_even_if_all_else_is_done(
    released: Path, tmp_path: Path, forget: Callable[[Path], None], report: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copytree(released.parent, tmp_path / "copy") / "clone"
    forget(root)
    assert any(report in line for line in missing(root, capsys))


@pytest.mark.parametrize(("forget", "report"), OTHERS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_step_after_the_commit_that_is_left_out_is_reported(
    released: Path, tmp_path: Path, forget: Callable[[Path], None], report: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copytree(released.parent, tmp_path / "copy") / "clone"
    forget(root)
    lines = missing(root, capsys)
    assert lines
    assert all(report in line or "of another commit" in line for line in lines)
    assert any(report in line for line in lines)


def test_the_checklist_of_this_clone_reports_what_its_changelog_says(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    main([])
    unreleased = "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
    assert ("CHANGELOG.md begins with 'Unreleased'" in capsys.readouterr().out) == unreleased
