"""What is released works without the repository: built, installed where nothing else is, and run there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.metadata import Metadata
from packaging.utils import canonicalize_name

import lightning_streaming
from tests.declared import PROJECT, closure

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_streaming"
FIT = f"""
import sys
from {PACKAGE}.__main__ import main
status = main(sys.argv[1:])
print("imported:", *(name for name in sys.modules if "." not in name))
sys.exit(status)
"""
STORES = {"s3fs", "gcsfs", "aiohttp"}
BESIDE = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"}
"""What the sdist has beside the package."""

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git to tell what belongs to the package")


class Release(NamedTuple):
    """What would be uploaded."""

    sdist: Path
    wheel: Path
    program: Path
    """The command, where the wheel is installed."""


def call(*words: object, cwd: Path) -> str:
    """Run a program that must end well, and without the repository: in another directory, with no path to it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked(*under: str) -> list[str]:
    """The files of the repository, less those that were deleted and are not committed yet."""
    listed = subprocess.run(["git", "ls-files", "-z", *under], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def build(kind: str, tree: Path, out: Path) -> Path:
    """Build as installers do, with the backend that is installed here."""
    code = f"import setuptools.build_meta as backend; print('\\n' + backend.build_{kind}({str(out)!r}))"
    return out / call(sys.executable, "-c", code, cwd=tree).splitlines()[-1]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """An sdist of what git knows, a wheel of that sdist, and a new environment that has the wheel."""
    root = tmp_path_factory.mktemp("release")
    for name in tracked():
        if not name.startswith(("docs/", "tests/golden/", "benchmarks/")):
            (root / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "tree" / name).write_bytes((ROOT / name).read_bytes())
    (root / "dist").mkdir()
    sdist = build("sdist", root / "tree", root / "dist")
    with tarfile.open(sdist) as packed:
        packed.extractall(root / "unpacked", filter="data")
    wheel = build("wheel", next((root / "unpacked").iterdir()), root / "dist")
    return Release(sdist, wheel, _installed(wheel, root / "venv"))


def _installed(wheel: Path, directory: Path) -> Path:
    venv.create(directory, with_pip=False)
    python = directory / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    call(*install, cwd=directory)
    # What it depends on, from here, and nothing else that is installed here.
    (site,) = directory.glob("lib/python*/site-packages")
    for name in closure(PROJECT, ""):
        with suppress(PackageNotFoundError):  # which another system or Python needs
            _link(distribution(name), site)
    return directory / "bin" / "lightning-streaming"


def _link(found: Distribution, site: Path) -> None:
    for name in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
        if not (site / name).exists():
            (site / name).symlink_to(str(found.locate_file(name)))


def members(release: Release) -> tuple[set[str], set[str]]:
    """Names of the files in wheel and sdist, those of the latter without its own folder."""
    with ZipFile(release.wheel) as wheel, tarfile.open(release.sdist) as sdist:
        files = [one.name.partition("/")[2] for one in sdist.getmembers() if one.isfile()]
        return set(wheel.namelist()), set(files)


def of_package(names: Sequence[str] | set[str]) -> set[str]:
    return {name for name in names if name.startswith(f"{PACKAGE}/")}


def test_wheel_and_sdist_have_all_of_the_package_and_nothing_else(release: Release) -> None:
    wheel, sdist = members(release)
    package = {name for name in tracked(PACKAGE) if not name.endswith(".md")}  # which tell of rooms, in the repository
    assert f"{PACKAGE}/py.typed" in package
    assert of_package(wheel) == package
    assert of_package(sdist) == package
    made = {name for name in sdist if ".egg-info/" in name or name in ("PKG-INFO", "setup.cfg", "MANIFEST.in")}
    assert sdist - package - made == BESIDE
    assert {name.partition("/")[0] for name in wheel - package} == {
        f"{PACKAGE}-{lightning_streaming.__version__}.dist-info"
    }


def test_an_index_can_show_what_the_metadata_says(release: Release) -> None:
    with ZipFile(release.wheel) as wheel:
        (name,) = (one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
        raw = wheel.read(name)
    told = Metadata.from_email(raw, validate=True)
    assert str(told.version) == lightning_streaming.__version__
    assert told.description_content_type == "text/markdown"
    assert told.license_expression == "Apache-2.0"
    assert set(told.project_urls or ()) >= {"Source", "Documentation", "Changelog", "Issues"}
    assert told.requires_python == ">=3.10"
    assert (told.description or "").strip() == (ROOT / "README.md").read_text().strip()


def test_citation_and_changelog_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == lightning_streaming.__version__
    assert citation["cff-version"] == "1.2.0"
    assert f'Documentation = "{citation["url"]}"' in (ROOT / "pyproject.toml").read_text()
    heads = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "Unreleased" or heads[0].startswith(lightning_streaming.__version__)
    assert ("date-released" in citation) == (heads[0] != "Unreleased")
    assert heads[0].endswith(str(citation.get("date-released", "Unreleased")))
    # What an index shows of a release says how to install it, and not that there is none.
    assert ("is not out yet" in " ".join((ROOT / "README.md").read_text().split())) == (heads[0] == "Unreleased")


def test_people_can_read_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert [line for line in text.splitlines() if len(line) > 150] == []
    first = re.split(r"^## ", text, flags=re.MULTILINE)[-1]
    assert re.findall(r"^#+ (?:Changed|Fixed|Removed|Deprecated)$", first, re.MULTILINE) == []  # of what nobody had


def test_what_is_installed_makes_a_dataset_and_trains_on_it(release: Release, tmp_path: Path) -> None:
    python, program = release.program.parent / "python", release.program
    where = call(python, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)", cwd=tmp_path)
    assert where.startswith(str(release.program.parents[1]))
    assert "usage: lightning-streaming" in call(program, "--help", cwd=tmp_path)
    rows = "".join(f'{{"x": {number}, "y": {2 * number}}}\n' for number in range(16))
    (tmp_path / "rows.jsonl").write_text(rows)
    call(program, "convert", "rows.jsonl", "data", "--workers", "1", cwd=tmp_path)
    assert "16" in call(program, "inspect", "data", cwd=tmp_path)
    call(program, "init", "data", cwd=tmp_path)
    fit = (python, "-c", FIT, "fit", "--config", "run.yaml", "--trainer.accelerator", "cpu", "--data.num_workers", "0")
    imported = call(*fit, "--data.persistent_workers", "false", cwd=tmp_path).split("imported: ")[1].split()
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    # An install without options brings what a first run imports, and the stores.
    names: dict[str, str] = {
        canonicalize_name(one): module for module, found in packages_distributions().items() for one in found
    }
    needed = closure(PROJECT, "", depth=1) - {PROJECT, *STORES}
    assert {name for name in needed if names[name] not in imported} == set()
