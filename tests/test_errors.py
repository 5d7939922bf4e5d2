"""The exception tree: as drawn, and able to cross from a worker to the training process."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import Any

import pytest
from torch._utils import ExceptionWrapper

from lightning_streaming import errors

ALL = [one for _, one in inspect.getmembers(errors, inspect.isclass) if one.__module__ == errors.__name__]


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


@pytest.mark.parametrize("error", ALL)
def test_each_says_in_one_sentence_what_it_is(error: type[Exception]) -> None:
    assert re.fullmatch(r"[A-Z`].*\.", inspect.getdoc(error) or "")
