"""Every run of the oracle reads what it read when the golden file was written, and so does every resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle.cases import Case, cases, write_data
from tests.oracle.record import known, read, resume

KNOWN = known()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("oracle")
    write_data(root)
    return root


@pytest.mark.rotate(9)
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_run_and_its_resume_read_what_they_always_did(case: Case, data: Path) -> None:
    golden = KNOWN[case.name]
    found = read(case, data)
    assert (found["read"], found["resumed"]) == (golden["read"], golden["resumed"])
    assert resume(case, golden["state"], data) == golden["resumed"], "from a state that was saved then"


def test_the_golden_file_has_these_runs() -> None:
    assert KNOWN.keys() == {case.name for case in cases()}
