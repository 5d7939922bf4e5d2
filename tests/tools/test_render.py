from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lightning_streaming.tools.render import name, render


class Odd:
    def __repr__(self) -> str:
        return "odd\x1b[31m" + "x" * 10_000


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("short", "'short'"),
        ("a" * 161, f"'{'a' * 160}'… (161 characters)"),
        ("bell\a and\nline", r"'bell\x07 and\nline'"),
        (b"", "0 bytes b''"),
        (b"\x89", r"1 byte b'\x89'"),
        (b"\x89PNG" + bytes(1230), r"1,234 bytes b'\x89PNG" + r"\x00" * 20 + "'…"),
        (7, "7"),
        (-0.1, "-0.1"),
        (None, "None"),
        (True, "True"),
        (Decimal("1E-28"), "1E-28"),
        (np.float16(0.1), "0.1"),
        (np.uint64(2**64 - 1), "18446744073709551615"),
        (10**5000, "a huge int"),
        (np.arange(8, dtype=np.uint16), "uint16[8] 0 1 2 3 4 5 6 7"),
        (np.arange(2049, dtype=np.uint16), "uint16[2049] 0 1 2 3 … 2045 2046 2047 2048"),
        (np.zeros((32, 32, 3), np.uint8), "uint8[32×32×3] 0 0 0 0 … 0 0 0 0"),
        (np.zeros((0, 3), np.int8), "int8[0×3]"),
        (Image.new("RGB", (4, 3)), "image RGB 4×3"),
        ([], "[]"),
        ([Image.new("L", (1, 2)), "x"], "[image L 1×2, 'x']"),
        (list(range(1000)), "[0, 1, 2, 3, … 1,000 items]"),
        ({"a": 1, "b\n": None}, r"{a: 1, 'b\n': None}"),
        ([[[["deep"]]]], "[[[[… 1 item]]]]"),
        ([[[[]]]], "[[[[]]]]"),
        (complex(1, 2), "(1+2j)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_are_shown_by_what_they_are(value: Any, shown: str) -> None:
    assert render(value) == shown


def test_a_value_of_any_class_is_short_and_does_nothing_to_a_terminal() -> None:
    shown = render(Odd())
    assert shown.startswith("odd")
    assert len(shown) < 100
    assert "\x1b" not in shown


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=50)
@given(json_values)
def test_any_value_is_one_printable_line(value: Any) -> None:
    shown = render(value)
    assert shown.isprintable()
    assert len(shown) < 100_000


@pytest.mark.parametrize(("text", "shown"), [("é b", "é b"), ("", "''"), ("a\x1b", r"'a\x1b'")])
def test_names_are_quoted_where_they_must_be(text: str, shown: str) -> None:
    assert name(text) == shown


def test_pil_is_not_imported_to_look_for_images() -> None:
    code = (
        "import sys; from lightning_streaming.tools.render import render\n"
        "render(object()); assert 'PIL' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
