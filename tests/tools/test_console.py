"""What tools print: codes, notes and progress; and values in a few words."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lightning_streaming.errors import ConfigError
from lightning_streaming.tools.console import (
    print_error,
    print_json,
    print_note,
    print_table,
    printable_name,
    progress,
    render,
)
from tests.tiers import examples
from tests.tools.running import run_process, write_texts

_MOST_DIMENSIONS = 32 if np.lib.NumpyVersion(np.__version__) < "2.0.0" else 63
"""Of an array that can be stored; numpy 1 has no more than 32."""


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_an_error_is_one_line_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("lightning-streaming copy", ConfigError("long " * 100 + "end"))
    assert capsys.readouterr() == ("", "lightning-streaming copy: error: " + "long " * 100 + "end\n")


def test_an_error_is_one_block_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    url = "s3://bucket/" + "x" * 60
    print_error("tool", ConfigError(f"words before {url} and some words after it"))
    lines = terminal.getvalue().splitlines()
    assert lines[0] == "tool: error: words before"
    assert lines[1] == f"  {url}", "what is to be copied is not broken"
    assert all(line.startswith("  ") for line in lines[1:])


def test_texts_that_are_to_stay_whole_are_not_broken_however_narrow_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    heads = ("stream", "in all", "digest")
    row = ("a long name of a stream", "16,000,000", "63ab2f4051e3c361")
    print_table("samples", heads, [row], right=["in all"], whole=heads[1:])
    printed = capsys.readouterr().out
    assert all(text in printed for text in row[1:])
    assert max(map(len, printed.splitlines())) <= 12 + 10 + 16 + 3 * 3 + 1
    print_table("samples", heads, [row], right=["in all"])
    assert row[2] not in capsys.readouterr().out


def test_nothing_of_a_table_is_cut_that_is_just_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    heads = ("phase", "ends", "share")
    for length in range(1, 30):
        row = ("p" * length, "16,000,000", "100.0%")
        for title in heads, ("phase", "so far", "share"):
            print_table("phases", title, [row], right=title[1:], whole=title)
            assert capsys.readouterr().out.split()[-3:] == list(row)


HEADS = ("cache_limit", "fetched in all", "by a node", "× needed", "peak of a node", "exceeded")
ROW = ("2.0 MB (configured)", "4.4 MB", "2.2 MB", "1.00", "2.0 MB", "-")


@pytest.mark.parametrize(
    ("width", "head"),
    [
        (91, ["  cache_limit           fetched in all   by a node   × needed   peak of a node   exceeded"]),
        (
            90,
            [
                "                        fetched",
                "  cache_limit            in all   by a node   × needed   peak of a node   exceeded",
            ],
        ),
        (
            80,
            [
                "                        fetched                          peak of",
                "  cache_limit            in all   by a node   × needed    a node   exceeded",
            ],
        ),
        (40, ["  cache_limit           fetched in all   by a node   × needed   peak of a node   exceeded"]),
    ],
)
def test_heads_take_more_lines_only_where_the_table_fits_then_and_not_before(
    width: int, head: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table("caches", HEADS, [ROW], right=HEADS[1:], whole=HEADS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:-3] == head
    assert lines[-2].split("   ")[0].strip() == ROW[0]
    assert width < 80 or max(map(len, lines)) <= width


def test_of_texts_the_widest_is_put_in_lines_and_words_stay_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = "/a/path/of/many/parts/without/any/blank"
    row = ("7", f"{path} is missing, as are some others of its directory", "two words")
    print_table("bad files", ("shard", "what is wrong", "why"), [row])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert path in printed
    assert "two words" in printed
    assert len(printed.splitlines()) == 7


@given(
    st.lists(st.tuples(st.text("ab ", min_size=1, max_size=30), st.text("xy é", max_size=60)), min_size=1, max_size=5),
    st.integers(20, 120),
)
def test_a_table_is_as_wide_as_the_terminal_where_it_can_be_and_says_everything(
    columns: list[tuple[str, str]], width: int
) -> None:
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(StringIO()) as out:
        patched.setenv("COLUMNS", str(width))
        print_table("t", [head for head, _ in columns], [[text for _, text in columns]])
    lines = out.getvalue().splitlines()
    narrowest = 1 + sum(3 + max(12, len(head)) for head, _ in columns)
    assert max(map(len, lines)) <= max(width, narrowest)
    letters = sorted("".join(text for pair in columns for text in pair).replace(" ", ""))
    assert sorted("".join(lines[1:]).replace(" ", "").replace("─", "")) == letters


def test_notes_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    print_note("tool", "by the way")
    assert capsys.readouterr() == ("", "lightning-streaming tool: by the way\n")


def test_json_is_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": "é"})
    assert capsys.readouterr().out == '{\n  "a": "\\u00e9"\n}\n'


@pytest.mark.parametrize("unit", ["shards", "B"])
def test_progress_is_shown_on_a_terminal_only(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, is_shown in ((Terminal(), True), (StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress(10, "copy", unit) as advance:
            advance(10)
        assert ("copy" in stream.getvalue()) == is_shown


def on_terminal(*words: object) -> str:
    """What a command that ends well shows on standard error, which is a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "lightning_streaming", *map(str, words)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, check=True)
    shown = b""
    while select.select([ours], [], [], 0.2)[0]:
        shown += os.read(ours, 4096)
    os.close(theirs)
    os.close(ours)
    return shown.decode()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "bar"),
    [
        (("verify", "data"), "verify:   0%"),
        (("verify", "data", "--workers", 2), "verify:   0%"),
        (("copy", "data", "copied"), "copy:   0%"),
        (("convert", "rows.jsonl", "one"), "convert: 0 sample"),
        (("convert", "rows.jsonl", "several", "--part-size", "1kb", "--workers", 1), "writing: 100%"),
    ],
)
def test_a_real_terminal_sees_progress_and_a_pipe_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], bar: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "data")
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "text": "some words"}\n' * 100)
    assert f"\r{bar}" in on_terminal(*words)
    tool, what, *more = words
    if tool != "verify":
        more[0] = "again"
    assert "\r" not in run_process(tool, what, *more, cwd=tmp_path).err


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
        (np.array(7), "int64[] 7"),
        (np.ones((1,) * _MOST_DIMENSIONS, np.int8), f"int8[{'×'.join('1' * _MOST_DIMENSIONS)}] 1"),
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


@settings(max_examples=examples(50))
@given(json_values)
def test_any_value_is_one_printable_line(value: Any) -> None:
    shown = render(value)
    assert shown.isprintable()
    assert len(shown) < 100_000


@pytest.mark.parametrize(("text", "shown"), [("é b", "é b"), ("", "''"), ("a\x1b", r"'a\x1b'")])
def test_names_are_quoted_where_they_must_be(text: str, shown: str) -> None:
    assert printable_name(text) == shown


def test_pil_is_not_imported_to_look_for_images() -> None:
    code = (
        "import sys; from lightning_streaming.tools.console import render\n"
        "render(object()); assert 'PIL' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
