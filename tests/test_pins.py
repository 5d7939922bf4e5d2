"""The lock pins everything that the targets of the Makefile install, on every supported Python."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.declared import PROJECT, closure, project_requires
from tests.pins import LOCK, ROOT, differences, installed, main, read_pins, read_requirements

MAKEFILE = (ROOT / "Makefile").read_text()
LOWEST = ROOT / "constraints-lowest.txt"
PYTHONS = [f"3.{minor}" for minor in range(10, 15)]


def test_everything_that_check_installs_is_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    changed = differences()
    main()
    assert capsys.readouterr().out.count("\n") == 2 + len(changed)
    if any(pinned for _, pinned, _ in changed):
        pytest.skip("installed without the lock")
    needed = closure(PROJECT, "check") & installed().keys()  # the rest is needed by another Python or system
    assert needed - read_pins(LOCK).keys() == set(), "run `make lock`"


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_the_locks_satisfy_every_declared_bound(python: str, system: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": system}
    pins, lowest = read_pins(LOCK, environment), read_pins(LOWEST, environment)
    for requirement in map(Requirement, project_requires()):
        name, extra = canonicalize_name(requirement.name), str(requirement.marker)
        if name != PROJECT and "oci" not in extra:
            assert name in pins, f"{requirement}: run `make lock`"
            assert requirement.specifier.contains(pins[name]), requirement
            assert "check" in extra or requirement.specifier.contains(lowest[name]), requirement
    for requirement in read_requirements(ROOT / "constraints.in", environment):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
    by_hand = read_pins(ROOT / "constraints-lowest.in", environment)
    assert {name: lowest[name] for name in by_hand} == by_hand


def test_every_environment_is_installed_with_a_lock() -> None:
    installs = [line for line in MAKEFILE.splitlines() if "/pip install" in line]
    assert len(installs) > 5
    assert [line.split()[-1] for line in installs if "--constraint" not in line] == ["uv"]
    assert re.search(r"PIP_CONSTRAINT=.+ \S+/python -m build", MAKEFILE)
