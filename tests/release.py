"""The checklist of a release: ``python -m tests.release`` lists the steps that are missing, and fails if there are any.

Without options it checks the files of the commit that will be tagged; ``--tag v0.1.0`` also checks the tag and who
signed it, ``--dist dist --sbom sbom`` also the built files. It imports the standard library only: publish.yml runs it
before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_streaming"
SIGNERS = ".github/allowed_signers"
"""Public SSH keys of the maintainers whose tags are releases, in the format of ``ssh-keygen``."""
_NOT_RELEASED = ("is not out yet", "is not released yet")
_PAGES = ("README.md", "docs/install.md", "docs/stability.md")


def version_of(root: Path) -> str:
    """Return the version that the package has."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', (root / PACKAGE / "__init__.py").read_text(), re.MULTILINE)
    return str(version)


def missing_in_files(root: Path) -> Iterator[str]:
    """Yield a line for each step that the files of a clone lack, with its fix."""
    version = version_of(root)
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"__version__ is {version!r}: set it to three numbers"
    heading = re.findall(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    dated = re.fullmatch(re.escape(version) + r" - (\d{4}-\d\d-\d\d)", heading)
    if dated is None:
        yield f"CHANGELOG.md begins with {heading!r}: write '## {version} - YYYY-MM-DD'"
    citation = dict(re.findall(r"^([\w-]+): *(.+)$", (root / "CITATION.cff").read_text(), re.MULTILINE))
    if citation["version"] != version:
        yield f"CITATION.cff has version {citation['version']}: write {version}"
    if dated and citation.get("date-released") != dated[1]:
        yield f"CITATION.cff has date-released {citation.get('date-released')}: write {dated[1]}"
    for page in _PAGES:
        for words in _NOT_RELEASED:
            if words in " ".join((root / page).read_text().split()):
                yield f"{page} says that the release {words}: remove that, and install from the index"
    if not (root / SIGNERS).is_file():
        yield f"{SIGNERS} is missing: add the public key that signs the tag"


def missing_in_git(root: Path) -> Iterator[str]:
    """Yield a line for changes that are not committed, and for a version that was released from another commit."""
    if changed := _git(root, "status", "--porcelain").splitlines():
        yield f"{len(changed)} files are not committed, such as {changed[0][3:]}: commit them"
    tag = f"v{version_of(root)}"
    if _git(root, "tag", "--list", tag) and _commit(root, tag) != _commit(root, "HEAD"):
        yield f"{tag} is the tag of another commit: raise __version__"


def missing_in_tag(root: Path, tag: str) -> Iterator[str]:
    """Yield a line unless the tag is that of the version, of this commit, and signed by a maintainer."""
    if tag != f"v{version_of(root)}":
        yield f"the tag {tag} is not the version: __version__ is {version_of(root)}"
    elif not _git(root, "tag", "--list", tag):
        yield f"{tag} does not exist: git tag --sign {tag}"
    elif _commit(root, tag) != _commit(root, "HEAD"):
        yield f"{tag} is the tag of another commit: check out {tag}"
    elif (root / SIGNERS).is_file():
        keys = ("-c", f"gpg.ssh.allowedSignersFile={SIGNERS}", "verify-tag", tag)
        verified = subprocess.run(["git", *keys], cwd=root, capture_output=True, text=True, check=False)
        if verified.returncode:
            reason = (verified.stderr.strip() or "no signature").splitlines()[0]
            yield f"{tag} is not signed by a key in {SIGNERS} ({reason}): git tag --sign --force {tag}"


def missing_in_dist(root: Path, dist: Path) -> Iterator[str]:
    """Yield a line unless the wheel and the sdist in a directory are of this version, and the wheel of these files."""
    version = version_of(root)
    expected = {f"{PACKAGE}-{version}-py3-none-any.whl", f"{PACKAGE}-{version}.tar.gz"}
    names = {path.name for path in dist.glob("*")}
    if names != expected:
        yield f"{dist} has {sorted(names)}, not {sorted(expected)}: make dist"
        return
    with ZipFile(dist / f"{PACKAGE}-{version}-py3-none-any.whl") as wheel:
        packed = {name: wheel.read(name) for name in wheel.namelist() if name.startswith(f"{PACKAGE}/")}
    tracked = [name for name in _git(root, "ls-files", PACKAGE).splitlines() if not name.endswith(".md")]
    differ = sorted({*packed, *tracked} - {name for name in tracked if packed.get(name) == (root / name).read_bytes()})
    if differ:
        yield f"{len(differ)} files of the wheel are not those of the commit, such as {differ[0]}: make dist"


def missing_in_sbom(root: Path, sbom: Path) -> Iterator[str]:
    """Yield a line unless a directory has a bill of materials that lists this version and its dependencies."""
    version, path = version_of(root), sbom / f"{PACKAGE}-{version_of(root)}.cdx.json"
    if not path.is_file():
        yield f"{path} is missing: make sbom"
        return
    listed = {part["name"].lower(): part.get("version") for part in json.loads(path.read_text())["components"]}
    if listed.get(PACKAGE.replace("_", "-")) != version or "torch" not in listed:
        yield f"{path} does not list {PACKAGE} {version} with torch: make sbom"


def _commit(root: Path, name: str) -> str:
    return _git(root, "rev-parse", f"{name}^{{commit}}")


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.rstrip()


def main(words: list[str] | None = None, root: Path = ROOT) -> int:
    """Print the missing steps; return how many there are, as the exit status."""
    parser = argparse.ArgumentParser(description="List the missing steps of a release.")
    parser.add_argument("--tag", help="the tag of the release, such as v0.1.0")
    parser.add_argument("--dist", type=Path, help="the directory of wheel and sdist")
    parser.add_argument("--sbom", type=Path, help="the directory of the bill of materials")
    options = parser.parse_args(words)
    missing = [*missing_in_files(root), *missing_in_git(root)]
    missing += missing_in_tag(root, options.tag) if options.tag else []
    missing += missing_in_dist(root, options.dist) if options.dist else []
    missing += missing_in_sbom(root, options.sbom) if options.sbom else []
    for line in missing:
        print(line)  # noqa: T201
    return min(len(missing), 100)


if __name__ == "__main__":
    sys.exit(main())
