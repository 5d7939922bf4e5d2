from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import ShardCorruptError
from lightning_streaming.formats.tar_members import read_members
from tests.helpers import assert_error
from tests.tiers import examples

Found = list[tuple[str, bytes]]


def read(data: bytes, window: int = 2**30) -> Found:
    """Names and contents of a tar file that is read in windows of so many bytes, or as many as are needed."""

    def give(start: int, needed: int) -> memoryview:
        return memoryview(data)[start : start + max(window, needed)]

    members = [one for some in read_members(give, "x.tar") for one in zip(*some, strict=True)]
    return [(name, data[start : start + size]) for name, start, size in members]


def header(name: bytes, size: bytes, kind: bytes = b"0", *, signed: bool = False, sum_as: str = "%06o\0 ") -> bytes:
    """A header, of which the checksum is right."""
    block = bytearray(512)
    block[: len(name)], block[124 : 124 + len(size)], block[156:157] = name, size, kind
    block[148:156] = b" " * 8
    total = sum(block) - (256 * sum(byte > 127 for byte in block) if signed else 0)
    block[148:156] = (sum_as % total).encode()
    return bytes(block)


def blocks(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


END = bytes(1024)


def made(members: Found, tar_format: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tar_format) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), 1.5  # which PAX notes in records of its own
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


NAMES = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="\0/"), min_size=1, max_size=130)
MEMBERS = st.lists(st.tuples(NAMES, st.binary(max_size=1500)), max_size=8)


@settings(max_examples=examples(60))
@given(
    members=MEMBERS, tar_format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]), window=st.integers(1, 9999)
)
def test_what_tarfile_writes_is_read_in_any_windows(members: Found, tar_format: int, window: int) -> None:
    assert read(made(members, tar_format), window) == members


@settings(max_examples=examples(30))
@given(changed=st.integers(0, 2**20), value=st.integers(1, 255), window=st.sampled_from([512, 2**30]))
def test_no_header_can_change_without_a_word(changed: int, value: int, window: int) -> None:
    data = bytearray(made([(f"{number}.txt", b"x" * 100) for number in range(9)], tarfile.USTAR_FORMAT))
    place = changed % 9 * 1024 + changed // 9 % 512
    data[place] ^= value
    # A space in place of the first digit of a checksum, which is 0, says the same.
    assume((place % 1024, data[place]) != (148, ord(" ")))
    with assert_error(ShardCorruptError, path="x.tar") as raised:
        read(bytes(data), window)
    number = place // 1024
    assert f"after member '{number - 1}.txt'" in str(raised.value) or number == 0


BIG = b"\x80" + (3).to_bytes(11, "big")


@pytest.mark.parametrize(
    "head",
    [
        header(b"a", b"00000000003\0"),
        header(b"a", b"000000000003"),
        header(b"a", b"          3 "),
        header(b"a", b"3\0garbage..."[:12]),
        header(b"a\0rubbish", BIG),
        header(b"a", b"3", b"\0"),
        header(b"a", b"3", b"7"),
        header(b"a", b"3", sum_as="%07o\0"),
        header(b"a", b"3", sum_as=" %-6o\0"),
    ],
)
def test_numbers_of_all_writers_are_read(head: bytes) -> None:
    assert read(head + blocks(b"abc") + END) == [("a", b"abc")]


def test_checksums_of_signed_bytes_are_read() -> None:
    assert read(header("é".encode(), b"3", signed=True) + blocks(b"abc") + END) == [("é", b"abc")]


def test_names_that_are_no_utf8_keep_their_bytes() -> None:
    ((name, _),) = read(header(b"\xff.txt", b"0") + END)
    assert name.encode("utf-8", "surrogateescape") == b"\xff.txt"


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    said = b""
    for record in records:
        length = len(record) + 3
        length += len(str(length)) - 1
        said += b"%d %s\n" % (length, record)
    return header(b"pax", b"%o" % len(said), kind) + blocks(said)


def test_what_is_said_of_the_next_member_is_believed() -> None:
    data = pax(b"mtime=1", b"path=b/c", b"size=5") + header(b"a", b"0") + blocks(b"abcde")
    longer = (
        header(b"L", b"4", b"L") + blocks(b"g/h\0") + header(b"K", b"2", b"K") + blocks(b"k\0") + header(b"i", b"0")
    )
    assert read(data + header(b"d", b"0") + longer + header(b"j", b"0") + END) == [
        *(("b/c", b"abcde"), ("d", b""), ("g/h", b""), ("j", b"")),
    ]
    assert read(pax(b"comment=all", kind=b"g") + header(b"a", b"0") + END) == [("a", b"")]


def test_only_plain_files_are_members_and_unknown_kinds_are_passed_by() -> None:
    others = b"".join(header(b"x", b"777", kind) for kind in (b"1", b"2", b"3", b"4", b"5", b"6"))
    unknown = header(b"y", b"3", b"V") + blocks(b"abc")
    assert read(others + unknown + pax(b"path=z") + header(b"x", b"0", b"5") + header(b"a", b"0") + END) == [("a", b"")]


GOOD = header(b"a", b"3") + blocks(b"abc")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "x.tar must be a tar file, but has 0 bytes"),
        (b"x" * 511, "x.tar must be a tar file, but has 511 bytes"),
        (b"x" * 512, "x.tar is not a tar file, or its first header is damaged: its checksum must be"),
        (GOOD, "x.tar is truncated, or its writer was not closed: .* at least 1536 bytes.*its last member is 'a'"),
        (GOOD[:700], "is truncated.*its last member is 'a'"),
        (GOOD + bytes(511), "is truncated"),
        (GOOD + GOOD[:100] + bytes(412) + END, "x.tar: the header after member 'a' is damaged: its checksum"),
        (GOOD + header(b"b", b"\xff" * 12), "after member 'a' is damaged: its size is"),
        (GOOD + header(b"b", b"\x80" + b"\xff" * 11), "its size is"),
        (GOOD + header(b"b", b"-1"), "its size is"),
        (GOOD + header(b"b", b"-0000000777\0"), "its size is"),
        (GOOD + header(b"b", b"9"), "its size is"),
        (GOOD + header(b"b", b"00000000009\0"), "invalid literal"),
        (GOOD + header(b"b", b"77777777777"), "is truncated"),
        (GOOD + header(b"b", b"0", b"S"), "it is of a sparse file"),
        (GOOD + pax(b"GNU.sparse.major=1"), "it is of a sparse file"),
        (GOOD + pax(b"path=x", kind=b"g"), "all members that follow"),
        (GOOD + pax(b"size=-5") + header(b"b", b"0"), "its size is -5"),
        (GOOD + header(b"p", b"10", b"x") + blocks(b"99 path=x\n"), "its records are damaged"),
        (GOOD + header(b"p", b"10", b"x") + blocks(b"0 path=x\n\n"), "its records are damaged"),
        (GOOD + header(b"p", b"10", b"x") + blocks(b"ab path=x\n"), "invalid literal"),
        (GOOD + header(b"p", b"77777777", b"L"), "more than any writer needs"),
        (GOOD + header(b"p", b"10000", b"L"), "is truncated"),
    ],
)
@pytest.mark.parametrize("window", [512, 2**30])
def test_what_is_no_sound_tar_file_is_refused(data: bytes, said: str, window: int) -> None:
    with pytest.raises(ShardCorruptError, match=said):
        read(data, window)


def test_what_follows_the_end_is_not_looked_at() -> None:
    assert read(GOOD + bytes(1024) + b"anything") == [("a", b"abc")]


def test_a_header_of_zeros_is_no_end() -> None:
    assert read(GOOD + bytes(512)) == [("a", b"abc")]
    with assert_error(ShardCorruptError, path="x.tar") as caught:
        read(GOOD + bytes(512) + GOOD)
    assert "member" in str(caught.value)


def test_many_headers_are_all_checked(tmp_path: Path) -> None:
    data = bytearray(made([(f"{number}.txt", b"") for number in range(10_000)], tarfile.USTAR_FORMAT))
    assert len(read(bytes(data))) == 10_000
    data[512 * 9_000 + 300] ^= 1
    with assert_error(ShardCorruptError, path="x.tar") as caught:
        read(bytes(data))
    assert "8999" in str(caught.value)


def test_headers_of_random_bytes_end_in_an_error() -> None:
    random_bytes = random.Random(0)
    sources: list[Callable[[], Any]] = [
        lambda: random_bytes.randbytes(4096),
        lambda: b"0" * 4096,
        lambda: b"\xff" * 4096,
    ]
    for give in sources:
        with pytest.raises(ShardCorruptError):
            read(give())
