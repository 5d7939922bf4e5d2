from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from lightning_streaming.cache.marks import SECOND, OwnTimes, make_mark, mark_of_original, read_mark, verified_mark


def test_a_mark_is_a_whole_second_long_ago() -> None:
    for mark in (make_mark(), mark_of_original(1_700_000_000_123_456_789, 5)):
        assert mark % SECOND == 0
        assert 2001 <= datetime.fromtimestamp(mark // SECOND, timezone.utc).year <= 2009


def test_a_directory_owns_what_has_its_mark() -> None:
    mark = make_mark()
    assert OwnTimes(mark).include(mark)
    assert not OwnTimes(mark).include(verified_mark(mark))
    assert not OwnTimes(mark).include(1_700_000_000 * SECOND)


def test_a_directory_of_decompressed_files_owns_what_has_any_mark() -> None:
    assert OwnTimes(None).include(mark_of_original(1, 2))
    assert not OwnTimes(None).include(mark_of_original(1, 2) + 1)
    assert not OwnTimes(None).include(1_700_000_000 * SECOND)


def test_a_file_made_from_another_original_has_another_mark() -> None:
    marks = {mark_of_original(modified, size) for modified in (1, 2, 10**18) for size in (1, 2)}
    assert len(marks) == 6


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("0123456789abcdef\n1000000000000000000\n", 10**18),
        ("0123456789abcdef", None),
        ("0123456789abcdef\nnonsense", None),
        ("0123456789abcdef\n1700000000000000000", None),  # of 2023, so not a mark
    ],
)
def test_the_mark_is_on_the_second_line_of_the_origin_file(tmp_path: Path, text: str, mark: int | None) -> None:
    (tmp_path / ".origin").write_text(text)
    assert read_mark(tmp_path) == mark
    assert read_mark(tmp_path / "elsewhere") is None
