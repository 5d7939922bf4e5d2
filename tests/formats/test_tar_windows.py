from __future__ import annotations

import gzip
from pathlib import Path

from lightning_streaming.cache.generated_index import FilesAt
from lightning_streaming.errors import ObjectNotFoundError, ShardCorruptError
from lightning_streaming.formats.tar_members import StoredWindow, UnpackedWindow, read_members
from lightning_streaming.formats.webdataset import WebDatasetFormat
from lightning_streaming.storage import Location
from tests.formats.tar_data import described, write_members
from tests.helpers import assert_error
from tests.servers import S3Store


class Watched(FilesAt):
    """Notes which bytes are asked for."""

    def __init__(self, place: Path) -> None:
        super().__init__(Location(str(place)))
        self.asked = list[tuple[int, int]]()

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        self.asked.append((start, stop))
        return super().read_range(name, start, stop)


def walked(place: Path, size: int) -> tuple[int, list[tuple[int, int]]]:
    files = Watched(place)
    window = StoredWindow(files, "00.tar", size)
    return sum(len(some.names) for some in read_members(window, "00.tar")), files.asked


def test_small_members_are_read_in_few_large_pieces(tmp_path: Path) -> None:
    path = write_members(tmp_path / "00.tar", [(f"{number}.txt", b"x" * 1000) for number in range(10_000)])
    found, asked = walked(tmp_path, path.stat().st_size)
    assert found == 10_000
    assert len(asked) < 10
    assert sum(stop - start for start, stop in asked) < path.stat().st_size + 10 * 1536


def test_large_members_are_jumped_over(tmp_path: Path) -> None:
    path = write_members(tmp_path / "00.tar", [(f"{number}.bin", bytes(3 * 2**20)) for number in range(10)])
    found, asked = walked(tmp_path, path.stat().st_size)
    assert found == 10
    assert len(asked) <= 11
    assert sum(stop - start for start, stop in asked) <= 11 * 2**16


def test_a_compressed_file_is_read_once_and_measured(tmp_path: Path) -> None:
    path = write_members(tmp_path / "00.tar", [(f"{number}.bin", bytes(number) * 9999) for number in range(99)])
    data = path.read_bytes()
    (tmp_path / "00.tar").write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]) + bytes(99))
    files = Watched(tmp_path)
    window = UnpackedWindow(files, "00.tar", path.stat().st_size)
    assert sum(len(some.names) for some in read_members(window, "00.tar")) == 99
    assert window.raw_bytes() == len(data)
    assert [start for start, _ in files.asked[1:]] == [stop for _, stop in files.asked[:-1]]


def test_a_compressed_file_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "00.tar"
    path.write_bytes(gzip.compress(bytes(10_000))[:-4])
    with assert_error(ShardCorruptError, path="00.tar"):
        UnpackedWindow(FilesAt(Location(str(tmp_path))), "00.tar", path.stat().st_size).raw_bytes()


def test_a_file_elsewhere_is_read_by_ranges(s3: S3Store, tmp_path: Path) -> None:
    path = write_members(tmp_path / "a" / "00.tar", [(f"{number}.bin", bytes(2**20)) for number in range(4)])
    bucket = s3.make_bucket()
    Location(f"{bucket}/a/00.tar", s3.options).upload(path)
    files = FilesAt(Location(bucket, s3.options))
    assert list(WebDatasetFormat().describe(files, {})) == described(tmp_path)


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    path = write_members(tmp_path / "00.tar", [("0.txt", b"x")])
    files = FilesAt(Location(str(tmp_path)))
    assert list(files.sizes()) == ["00.tar"]
    path.unlink()
    with assert_error(ObjectNotFoundError, path="00.tar"):
        list(WebDatasetFormat().describe(files, {}))
