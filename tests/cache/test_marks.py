from __future__ import annotations

from datetime import datetime, timezone

import pytest

from lightning_streaming.cache.marks import (
    SECOND,
    OwnTimes,
    make_mark,
    mark_of_original,
    next_mark,
    read_mark,
    verified_mark,
)


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
        (b"1000000000000000000", 10**18),
        (b"", None),
        (b"nonsense", None),
        (b"1700000000000000000", None),  # of 2023, so not a mark
    ],
)
def test_a_mark_is_read_only_where_there_is_one(text: bytes, mark: int | None) -> None:
    assert read_mark(text) == mark


def test_files_of_all_marks_of_a_directory_are_ours() -> None:
    marks = [make_mark()]
    while len(marks) < 64:
        marks.append(next_mark(marks[-1]))
    assert len(set(marks)) == 64
    for mark in (marks[0], marks[30], marks[-1]):
        assert all(OwnTimes(mark).include(other) for other in marks)
        assert not any(OwnTimes(mark).include(verified_mark(other)) for other in marks)
        assert not OwnTimes(mark).include(marks[0] - 2 * SECOND)
        assert not OwnTimes(mark).include(marks[-1] + 2 * SECOND)
    assert not OwnTimes(next_mark(marks[-1])).include(marks[0])  # used up, so those are not mistaken for new ones


def test_a_confirmed_file_stays_ours_or_not_and_keeps_the_latest_mark() -> None:
    earlier = make_mark()
    own = OwnTimes(next_mark(earlier))
    later = next_mark(next_mark(earlier))
    assert own.confirmed(earlier) == own.mark
    assert own.confirmed(later) == later
    assert own.mark is not None
    assert own.confirmed(verified_mark(earlier)) == verified_mark(own.mark)
    assert own.confirmed(verified_mark(later)) == verified_mark(later)
    assert own.confirmed(1_700_000_000 * SECOND) == own.confirmed(earlier + 1) == verified_mark(own.mark)
