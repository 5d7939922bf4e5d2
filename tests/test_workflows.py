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
    assert len(made) == 7
    assert {*made, "dist", "sbom", "demo_output", "build/docs"} <= set(done.stdout.split())


def test_the_makefile_names_tests_that_exist() -> None:
    paths = re.findall(r"tests/[\w/.]+", MAKEFILE)
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_release_passes_its_checklist_before_it_is_published_with_attestations() -> None:
    read, _ = workflow("publish")
    jobs = read["jobs"]
    steps = [step.get("run", "") for step in jobs["build"]["steps"]]
    checks = [number for number, step in enumerate(steps) if "tests.release" in step]
    assert checks[0] < steps.index("make dist") < steps.index("make sbom") < checks[1]
    assert "--dist dist --sbom sbom" in steps[checks[1]]
    assert 'git fetch --force --depth 1 origin "refs/tags/' in steps[checks[0]]  # the signature
    assert set(jobs["publish"]["needs"]) == {"install", "test"}
    assert jobs["install"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["steps"][-1]["with"] == {"attestations": True}
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish", "release"]
    assert jobs["install"]["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(10, 15)]


def test_the_site_of_each_release_is_published_with_that_of_main() -> None:
    read, run = workflow("docs")
    assert "make docs-versions" in run
    assert read["jobs"]["make"]["steps"][0]["with"] == {"fetch-depth": 0}  # with the tags
    assert "workflow_dispatch" in read[True]  # a tag starts nothing: who releases does; YAML reads `on` as a boolean
    assert read["jobs"]["publish"]["if"] == "github.event_name != 'pull_request'"
    assert "gh workflow run docs.yml" in (ROOT / "CONTRIBUTING.md").read_text()


def test_torch_is_tried_from_the_lowest_version_on() -> None:
    lowest = workflow("check")[0]["jobs"]["lowest"]
    (bound,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert lowest["strategy"]["matrix"]["torch"][0] == f"{bound}.0"
    lock, edit = (ROOT / "constraints-lowest.txt").read_text(), lowest["steps"][1]["run"]
    assert re.search(r"^torch==", lock, re.MULTILINE)
    assert "s/^torch==.*/torch==${{ matrix.torch }}/" in edit
    assert re.search(r"^sympy==", lock, re.MULTILINE)  # torch 2.6 needs 1.13.1 exactly, later ones any newer
    assert "-e '/^sympy==/d'" in edit


def test_issue_forms_are_such_as_the_site_shows() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    assert yaml.safe_load((folder / "config.yml").read_text())["blank_issues_enabled"] is False
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yml") if path.stem != "config"}
    assert forms.keys() == {"bug", "feature"}
    for form in forms.values():
        assert {"name", "description", "body"} <= form.keys()
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len(set(ids))
        for field in form["body"]:
            assert field["type"] in {"textarea", "input", "dropdown", "checkboxes"}
            assert field["attributes"]["label"]
            options = field["attributes"].get("options", [])
            assert all(isinstance(option, str) for option in options)  # a plain yes is a boolean
            assert bool(options) == (field["type"] == "dropdown")


def test_free_threaded_python_is_tried_every_night_but_may_fail() -> None:
    job = workflow("nightly")[0]["jobs"]["free-threaded"]
    assert job["continue-on-error"] is True
    assert job["steps"][1]["with"] == {"python-version": "3.14t"}
    assert any("not sys._is_gil_enabled()" in step.get("run", "") for step in job["steps"])
