from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import EncodingError
from lightning_streaming.formats.encodings import encoding

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda children: st.lists(children) | st.tuples(children, children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)


class Touchy:
    """Cannot be pickled, and its pickle cannot be read."""

    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise LookupError("not here")


class Unwritable:
    def __reduce__(self) -> Any:
        raise LookupError("not here")


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = encoding("pkl").decode(memoryview(encoding("pkl").encode(value)))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", [lambda: None, Unwritable()])
def test_a_value_that_does_not_fit_is_refused_in_words(value: Any) -> None:
    with pytest.raises(EncodingError, match="expected a value that pickle can write, but got"):
        encoding("pkl").encode(value)


@pytest.mark.parametrize(
    "payload", [b"", b"x", pickle.dumps([1] * 9)[:-3], pickle.dumps(Touchy()), b"cno.module\nx\n."]
)
def test_a_payload_that_is_none_is_refused(payload: bytes) -> None:
    with pytest.raises(EncodingError, match="expected a pickle, but found"):
        encoding("pkl").decode(memoryview(payload))
