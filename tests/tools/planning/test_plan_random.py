"""Runs at random do what was planned; ``tests/tools/planned_at_random.py`` makes as many as one likes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.tools.planned_at_random import check, random_run, served

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*worker processes in total.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
        patched.setenv("LIGHTNING_STREAMING_CACHE", "set below")
        with served() as url:
            yield url


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
def test_a_run_at_random_does_what_was_planned(url: str, tmp_path: Path, seed: int) -> None:
    told = random_run(Random(seed), url)
    found = check(told, url, tmp_path)
    assert found.is_as_planned, (str(found), told)
