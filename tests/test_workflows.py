"""The workflows run what the project promises: each Python, each kind of test, and all that tests need from outside."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def workflow(name: str) -> tuple[dict[Any, Any], str]:
    """A workflow, and all that it runs."""
    read = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    return read, "\n".join(step.get("run", "") for job in read["jobs"].values() for step in job["steps"])


def test_every_kind_of_test_is_run_on_every_python_with_all_it_needs() -> None:
    check, run = workflow("check")
    kinds = set(re.findall(r"^(test(?:-\w+)?|check):", MAKEFILE, re.MULTILINE)) - {"test-fast"}  # part of `test`
    nightly = workflow("nightly")[1]
    assert kinds | {"test-all"} == set(re.findall(r"make ([\w-]+)", f"{run}\n{nightly}"))
    assert check["jobs"]["test"]["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(10, 15)]
    assert "npm install --global azurite" in run
    peers = (ROOT / "benchmarks" / "reading" / "peers.txt").read_text()
    guides = ("mosaicml-streaming", "litdata", "megatron-energon")
    assert all(re.search(rf"^{name}==", peers, re.MULTILINE) for name in guides)


def test_pins_that_change_make_a_new_cache() -> None:
    for name in ("check", "docs"):
        steps = [step for job in workflow(name)[0]["jobs"].values() for step in job["steps"]]
        paths = [step["with"]["cache-dependency-path"] for step in steps if "cache" in step.get("with", {})]
        assert paths
        assert all("constraints*.txt" in path for path in paths)


def test_every_night_everything_is_tried_on_the_newest_versions_and_what_changed_is_reported() -> None:
    read, run = workflow("nightly")
    nightly: dict[Any, Any] = read
    job = nightly["jobs"]["newest"]
    assert "schedule" in nightly[True]  # YAML reads `on` as a boolean
    assert job["env"] == {"CONSTRAINTS": "/dev/null"}
    assert re.search(r"^CONSTRAINTS \?= constraints.txt$", MAKEFILE, re.MULTILINE)
    assert [one for one in run.splitlines() if "make" in one] == ["make .venv/.ready", "make test-all", "make check"]
    assert 'python -m tests.pins | tee -a "$GITHUB_STEP_SUMMARY"' in run
    assert all("cache" not in step.get("with", {}) for step in job["steps"])


def test_a_site_that_is_being_published_is_not_cancelled() -> None:
    cancelled = workflow("docs")[0]["concurrency"]["cancel-in-progress"]
    assert cancelled == "${{ github.event_name == 'pull_request' }}"


def test_a_release_is_built_with_nothing_else_installed_and_clean_removes_all_that_was_made() -> None:
    assert "make dist" in workflow("publish")[1]
    (needs,) = re.findall(r"^dist: (.*?)  ##", MAKEFILE, re.MULTILINE)
    assert needs == "$(DIST_VENV)/.ready"
    done = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True)
    made = set(re.findall(r"^\w+ := (\.venv[\w-]*)$", MAKEFILE, re.MULTILINE))
    assert len(made) == 6
    assert {*made, "dist", "demo_output", "build/docs"} <= set(done.stdout.split())


def test_the_makefile_names_tests_that_exist() -> None:
    paths = re.findall(r"tests/[\w/.]+", MAKEFILE)
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []
