"""Whatever happens to the bytes of a dataset, reading it ends in samples or in one of our errors."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from PIL import Image

from lightning_streaming.errors import ConfigError, EncodingError, FormatError, MissingDependencyError, StorageError
from lightning_streaming.formats.algorithms import decompress
from lightning_streaming.formats.images import open_image_file
from lightning_streaming.formats.index import ShardInfo, parse_index
from lightning_streaming.formats.shard import check_shard, open_shard
from tests.formats import fuzz
from tests.formats.golden_datasets import SERVED, SPLIT, read_index
from tests.formats.small_shards import damaged_bytes
from tests.golden import golden_path
from tests.tiers import amount, examples

TYPED = (FormatError, ConfigError, MissingDependencyError, StorageError)
QUICK = settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RAW_SHARD = golden_path("mds", "scalars", "shard.00000.mds").read_bytes()
ZIP_SHARD = golden_path("mds", "ndarray", "shard.00000.mds.zstd").read_bytes()
ZIP_RAW_BYTES = read_index(golden_path("mds", "ndarray")).shards[0].raw_data.bytes
INDEX = golden_path("mds", "scalars", "index.json").read_bytes()


def read_all(directory: Path, index_text: bytes) -> None:
    for shard in parse_index(index_text, "index.json").shards:
        check_shard(shard)
        read_shard(shard, directory)


def read_shard(shard: ShardInfo, directory: Path) -> None:
    """Read what can be read of a shard, sample by sample."""
    reader = open_shard(shard, directory)
    for index in range(len(reader)):
        with suppress(FormatError):
            reader[index]
    reader.close()


@QUICK
@given(damaged_bytes(RAW_SHARD))
def test_damaged_shards(tmp_path: Path, data: bytes) -> None:
    # Of the right size, because any other is refused before the content is looked at.
    (tmp_path / "shard.00000.mds").write_bytes(data[: len(RAW_SHARD)].ljust(len(RAW_SHARD), b"\0"))
    with suppress(FormatError):
        read_shard(parse_index(INDEX, "index.json").shards[0], tmp_path)


@QUICK
@given(damaged_bytes(INDEX))
def test_damaged_indexes(index_text: bytes) -> None:
    with suppress(*TYPED):
        read_all(golden_path("mds", "scalars"), index_text)


@QUICK
@given(damaged_bytes(ZIP_SHARD))
def test_damaged_compressed_shards(data: bytes) -> None:
    with suppress(FormatError):
        assert len(decompress("zstd", data, ZIP_RAW_BYTES)) == ZIP_RAW_BYTES


def test_without_damage_all_of_it_is_read() -> None:
    """The tests above would pass, too, if nothing could ever be read."""
    read_all(golden_path("mds", "scalars"), INDEX)
    assert len(decompress("zstd", ZIP_SHARD, ZIP_RAW_BYTES)) == ZIP_RAW_BYTES


def test_damaged_datasets_end_in_samples_or_in_our_errors() -> None:
    """In a process of its own, which may take only so much memory, and open only its own files."""
    cases = amount(600, 3000)
    command = [sys.executable, "-m", "tests.formats.fuzz", "--count", str(cases)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{cases} cases: ")
    endings, samples = map(endings_in, done.stdout.splitlines())
    assert {"read", "IndexFormatError", "ShardCorruptError"} <= endings.keys()
    assert endings["read"] > cases / 10  # else nothing of the samples would have been tried
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
