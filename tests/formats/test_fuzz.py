from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_streaming.errors import EncodingError
from lightning_streaming.formats.image_files import open_image_file
from tests.formats import fuzz
from tests.formats.golden_datasets import SERVED, SPLIT

CASES = 3000


def test_damaged_datasets_end_in_samples_or_in_our_errors() -> None:
    """In a process of its own, which may take only so much memory, and open only its own files."""
    command = [sys.executable, "-m", "tests.formats.fuzz", "--count", str(CASES)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{CASES} cases: ")
    endings, samples = map(endings_in, done.stdout.splitlines())
    assert {"read", "IndexFormatError", "ShardCorruptError"} <= endings.keys()
    assert endings["read"] > CASES / 10  # else nothing of the samples would have been tried
    assert {"read", "ShardCorruptError", "EncodingError"} <= samples.keys()


def endings_in(line: str) -> dict[str, int]:
    """How many ended how, by the line that tells it."""
    return {name: int(count) for count, name in (one.split() for one in line.split(": ")[1].split(", "))}


def test_pixels_are_decoded_that_reading_a_sample_only_opens() -> None:
    file = io.BytesIO()
    Image.effect_noise((32, 32), 50).save(file, "JPEG")
    image = open_image_file(file.getvalue()[:-300])
    for value in (image, [image]):
        with pytest.raises(EncodingError, match="cannot be decoded"):
            fuzz.load_images(value)


def test_cases_can_be_of_one_kind_of_shards() -> None:
    for kind, names in (("split", set(SPLIT)), ("mds", set(SERVED) - set(SPLIT))):
        assert {fuzz.make_case(number, fuzz.NAMES[kind]).name for number in range(300)} == names


def test_a_case_is_told_by_its_number() -> None:
    assert fuzz.make_case(7) == fuzz.make_case(7)
    assert len({fuzz.make_case(number).index for number in range(50)}) > 20


def _fail(error: Exception) -> Any:
    def read(case: fuzz.Case, directory: Path, samples: Counter[str]) -> int:
        raise error

    return read


@pytest.mark.parametrize("error", [KeyError("a"), MemoryError(), RecursionError(), OSError()])
def test_an_error_that_is_not_ours_is_found(error: Exception) -> None:
    with pytest.raises(type(error)):
        fuzz.run_case(fuzz.make_case(0), Counter(), _fail(error))


def test_a_case_that_hangs_ends_the_run_and_shows_where() -> None:
    script = (
        "import threading\n"
        "from tests.formats import fuzz\n"
        "def hang(*_): threading.Event().wait()\n"
        "fuzz.SECONDS_PER_CASE, fuzz.run_case = 1, hang\n"
        "fuzz.main(['--count', '1'])\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGALRM
    assert "in hang" in done.stderr


def test_memory_beyond_the_size_class_is_found() -> None:
    def read(case: fuzz.Case, directory: Path, samples: Counter[str]) -> int:
        return 0 * len(bytes(fuzz.SLACK_BYTES + fuzz.BYTES_PER_BYTE * case.size))

    with pytest.raises(AssertionError, match="bytes were set aside for"):
        fuzz.run_case(fuzz.make_case(0), Counter(), read)


@pytest.mark.parametrize(("path", "is_refused"), [("/etc/passwd", True), (__file__, False), ("shard", False)])
def test_a_file_elsewhere_is_found(path: str, is_refused: bool) -> None:
    try:
        fuzz.refuse_files_elsewhere("open", (path, "r", 0))
    except AssertionError:
        assert is_refused
    else:
        assert not is_refused
