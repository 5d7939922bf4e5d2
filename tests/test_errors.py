"""The exception tree: as drawn, and able to cross from a worker to the training process."""

from __future__ import annotations

import inspect
import pickle
import re
import traceback
from typing import Any

import pytest
from torch._utils import ExceptionWrapper

from lightning_streaming import errors

ALL = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, errors.StreamingError)]


def test_the_tree_is_as_it_is_drawn() -> None:
    drawn: dict[str, tuple[str | None, str | None]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    ([│├└─ ]*)(\w+Error)(?: \((\w+)\))?(?:  |$)", line)
        if found:
            depth = len(found[1]) // 4
            path = [*path[:depth], found[2]]
            drawn[found[2]] = (path[depth - 1] if depth else None, found[3])
    real = {
        one.__name__: (
            next((base.__name__ for base in one.__bases__ if base in ALL), None),
            next((base.__name__ for base in one.__bases__ if base not in (*ALL, Exception)), None),
        )
        for one in ALL
    }
    assert drawn == real


@pytest.mark.parametrize("error", ALL)
def test_each_pickles_with_its_message(error: type[Exception]) -> None:
    copied = pickle.loads(pickle.dumps(error("what was asked, found, and the way out")))
    assert (type(copied), str(copied)) == (error, "what was asked, found, and the way out")


@pytest.mark.parametrize("error", ALL)
def test_each_is_raised_again_from_a_worker_in_its_own_class(error: type[Exception]) -> None:
    wrap: Any = ExceptionWrapper
    try:
        raise error("stream 'code'")
    except errors.StreamingError:
        carried = pickle.loads(pickle.dumps(wrap(where="in DataLoader worker process 0")))
    with pytest.raises(error, match="stream 'code'") as caught:
        carried.reraise()
    assert type(caught.value) is error


FIELDS: dict[str, Any] = {
    "hint": "do this",
    "option": "packing.capacity",
    "stream": "web",
    "path": "s3://a/b",
    "sample": 7,
}


@pytest.mark.parametrize("error", ALL)
def test_each_pickles_with_its_fields(error: type[errors.StreamingError]) -> None:
    copied = pickle.loads(pickle.dumps(error("wrong: 5", **FIELDS)))
    assert {name: getattr(copied, name) for name in FIELDS} == FIELDS
    assert (copied.args, str(copied)) == (("wrong: 5",), "wrong: 5; do this")
    bare = error("wrong")
    assert {name: getattr(bare, name) for name in FIELDS} == dict.fromkeys(FIELDS)


@pytest.mark.parametrize("error", ALL)
def test_a_caller_adds_what_it_knows_once(error: type[errors.StreamingError]) -> None:
    inner = error("wrong: 5", path="a")
    told = inner.with_context("stream 'web'", stream="web", path="b").with_context("stream 'web'")
    assert (type(told), str(told), told.stream, told.path) == (error, "stream 'web': wrong: 5", "web", "a")
    assert (str(inner), inner.stream) == ("wrong: 5", None)
    lines = error(message="one\ntwo").with_context("stream 'web'")
    assert str(lines) == "stream 'web': one\ntwo"


HOSTILE = "a\x1b[2J\rb\nfake: fine\x85\u2028\u2029\u202e\ud800\x9b"
SHOWN = r"a\x1b[2J\rb\nfake: fine\x85\u2028\u2029\u202e\ud800\x9b"


@pytest.mark.parametrize("error", ALL)
def test_the_message_of_each_is_one_printable_line_and_its_argument_stays(error: type[Exception]) -> None:
    copied = pickle.loads(pickle.dumps(error(HOSTILE)))
    assert (str(copied), copied.args) == (SHOWN, (HOSTILE,))
    assert traceback.format_exception_only(copied)[-1].endswith(f"{error.__name__}: {SHOWN}\n")


@pytest.mark.parametrize("error", ALL)
def test_the_middle_of_a_very_long_message_is_left_out(error: type[errors.StreamingError]) -> None:
    copied = pickle.loads(pickle.dumps(error(f"first {'x' * 10**6} last", hint=f"do {'y' * 10**6} this")))
    words = str(copied)
    assert len(words) < 9000
    assert (words[:6], words[-5:]) == ("first ", " this")
    assert " last; do " in words


@pytest.mark.parametrize("error", ALL)
def test_a_message_of_lines_has_its_lines_and_nothing_else(error: type[errors.StreamingError]) -> None:
    copied = pickle.loads(pickle.dumps(error(message="one\n\ttwo \x1b[2J")))
    assert str(copied) == "one\n\ttwo \\x1b[2J"


def test_a_worker_s_traceback_keeps_its_lines_and_what_it_shows_is_escaped() -> None:
    wrap: Any = ExceptionWrapper
    try:
        raise errors.EncodingError(HOSTILE)
    except errors.EncodingError:
        carried = wrap(where="in DataLoader worker process 0")
    with pytest.raises(errors.EncodingError) as caught:
        carried.reraise()
    assert "\nOriginal Traceback (most recent call last):\n  File" in str(caught.value)
    assert str(caught.value).endswith(f"EncodingError: {SHOWN}\n")


@pytest.mark.parametrize("error", ALL)
def test_each_says_in_one_sentence_what_it_is(error: type[Exception]) -> None:
    assert re.match(r"[A-Z`].*\.(\n\n|$)", inspect.getdoc(error) or "")
