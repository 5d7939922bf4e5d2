from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.formats import fuzz

CASES = 3000


def test_damaged_datasets_end_in_samples_or_in_our_errors() -> None:
    """In a process of its own, which may take only so much memory, and open only its own files."""
    command = [sys.executable, "-m", "tests.formats.fuzz", "--count", str(CASES)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{CASES} cases: ")
    endings = {name: int(count) for count, name in (one.split() for one in done.stdout.split(": ")[1].split(", "))}
    assert {"read", "IndexFormatError", "ShardCorruptError"} <= endings.keys()
    assert endings["read"] > CASES / 10  # else nothing of the samples would have been tried


def test_a_case_is_told_by_its_number() -> None:
    assert fuzz.make_case(7) == fuzz.make_case(7)
    assert len({fuzz.make_case(number).index for number in range(50)}) > 20


def _fail(error: Exception) -> Any:
    def read(case: fuzz.Case, directory: Path) -> tuple[int, int]:
        raise error

    return read


@pytest.mark.parametrize("error", [KeyError("a"), MemoryError(), RecursionError(), OSError()])
def test_an_error_that_is_not_ours_is_found(error: Exception) -> None:
    with pytest.raises(type(error)):
        fuzz.run_case(0, _fail(error))


def test_memory_beyond_the_size_class_is_found() -> None:
    def read(case: fuzz.Case, directory: Path) -> tuple[int, int]:
        return len(bytes(fuzz.SLACK_BYTES + fuzz.BYTES_PER_BYTE * case.size)), 0

    with pytest.raises(AssertionError, match="bytes were set aside for"):
        fuzz.run_case(0, read)


@pytest.mark.parametrize(("path", "is_refused"), [("/etc/passwd", True), (__file__, False), ("shard", False)])
def test_a_file_elsewhere_is_found(path: str, is_refused: bool) -> None:
    try:
        fuzz.refuse_files_elsewhere("open", (path, "r", 0))
    except AssertionError:
        assert is_refused
    else:
        assert not is_refused
