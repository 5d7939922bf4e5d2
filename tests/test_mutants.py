"""The table of mistakes fits the package: each names a text that is there once, and tests that are there."""

from __future__ import annotations

import pytest

from tests.mutants import ROOT, Mutant, mutants


def test_each_mistake_can_be_made() -> None:
    for mutant in mutants():
        assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1, mutant.name
        assert mutant.new != mutant.old
        assert mutant.tests
        assert all((ROOT / test).exists() for test in mutant.tests), mutant.name


def test_a_text_that_is_not_there_is_reported() -> None:
    with pytest.raises(ValueError, match="0 times"):
        Mutant("x", "README.md", "no such text", "", []).apply(ROOT)
