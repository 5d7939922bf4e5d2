"""Texts that nobody has checked, wherever they are printed: they are shown, and do nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_streaming.errors import AccessDeniedError, ConfigError, StreamingError
from lightning_streaming.escaping import Lines, in_lines, in_one_line, package_logger, shell_word, short_repr
from lightning_streaming.storage import Location
from lightning_streaming.writing.writers import MDSWriter
from tests.tools.running import run, write_texts

HOSTILE = "a\x1b[2J\rb\nfake: all sound\x85\u2028\u2029\u202e\ud800\x9b"
SHOWN = r"a\x1b[2J\rb\nfake: all sound\x85\u2028\u2029\u202e\ud800\x9b"


@given(st.text())
def test_any_text_becomes_one_printable_line_and_a_printable_one_stays(text: str) -> None:
    assert in_one_line(text).isprintable()
    assert in_one_line(in_one_line(text)) == in_one_line(text)
    assert not text.isprintable() or in_one_line(text) == text
    assert in_lines(text).replace("\n", "").replace("\t", "").isprintable()
    assert in_lines(text).count("\n") == text.count("\n")


class _WithoutRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize(
    "value", ["it's", "a" * 298, b"x", 3, 10**40, None, [1, ("a", {})], {"b": 1, "a": [2.5]}, Path("x")]
)
def test_short_values_are_shown_as_they_are(value: object) -> None:
    assert short_repr(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        "a" * 10**6,
        10**5000,
        -(10**5000),
        [*range(10**5)],
        {str(key): key for key in range(10**4)},
        ["a" * 10**5] * 9,
        b"x" * 10**5,
        {"a": {"b": "c" * 10**5}},
        [10**5000],
        {*range(10**4)},
        _WithoutRepr(),
        [_WithoutRepr()],
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_middle_of_long_values_is_left_out(value: object) -> None:
    assert len(short_repr(value)) <= 300


def test_values_that_hold_many_others_are_shown_in_part() -> None:
    nested: list[Any] = []
    for _ in range(400):
        nested = [nested]
    assert short_repr(nested) == "[[[[[[[...]]]]]]]"
    assert short_repr({"a": nested})[:9] == "{'a': [[["
    assert short_repr([*range(50)]) == f"{[*range(40)]}"[:-1] + ", ...]"
    assert short_repr(dict.fromkeys(range(50), 1)) == f"{dict.fromkeys(range(40), 1)}"[:-1] + ", ...}"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_shell_reads_the_same_word_again() -> None:
    names = [HOSTILE.replace("\ud800", "\udcff"), "it's", "a\nb'c\\d", "é b", "", "\x1b1", "\x7f\U000e0001"]
    assert all(shell_word(name).isprintable() for name in names)
    command = f"printf '%s\\0' {' '.join(map(shell_word, names))}"
    read = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, check=True, env={"LC_ALL": "C.UTF-8"}).stdout
    assert read.decode(errors="surrogateescape").split("\0")[:-1] == names


def test_each_character_that_acts_on_a_terminal_is_escaped() -> None:
    assert in_one_line(HOSTILE) == SHOWN
    assert in_lines(HOSTILE) == SHOWN.replace(r"\n", "\n")


@pytest.mark.parametrize(
    "value",
    [HOSTILE, PurePosixPath(HOSTILE), ConfigError(HOSTILE), OSError(HOSTILE)],
    ids=lambda one: type(one).__name__,
)
def test_arguments_of_a_log_line_are_escaped_and_ours_keep_their_lines(
    value: object, caplog: pytest.LogCaptureFixture
) -> None:
    logger = package_logger(f"{__name__}.{type(value).__name__}")
    logger.warning("%s: %d bytes\n%s", value, 7, Lines("two\nlines"))
    assert caplog.messages == [f"{SHOWN}: 7 bytes\ntwo\nlines"]


def _edit_index(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "index.json"
    index = json.loads(path.read_text())
    for shard in index["shards"]:
        change(shard)
    path.write_text(json.dumps(index))


def _set_name(shard: dict[str, Any]) -> None:
    shard["raw_data"]["basename"] = HOSTILE


def _set_encoding(shard: dict[str, Any]) -> None:
    shard["column_encodings"] = [HOSTILE] * len(shard["column_encodings"])


def _set_column(shard: dict[str, Any]) -> None:
    shard["column_names"] = [f"{HOSTILE}{name}" for name in shard["column_names"]]


def _set_hash(shard: dict[str, Any]) -> None:
    shard["raw_data"]["hashes"] = {HOSTILE: HOSTILE}


@pytest.mark.parametrize("change", [_set_name, _set_encoding, _set_column, _set_hash])
@pytest.mark.parametrize(
    "words", [["inspect"], ["verify"], ["verify", "--quick"], ["init", "--out", "run"], ["lengths", "--lengths", "no"]]
)
def test_tools_show_a_hostile_index_in_printable_lines_and_invent_none(
    change: Callable[[dict[str, Any]], None], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "data", samples=2)
    _edit_index(tmp_path / "data", change)
    monkeypatch.chdir(tmp_path)
    told = run(words[0], "data", *words[1:])
    for text in (told.out, told.err):
        assert text.replace("\n", "").isprintable()
        assert not any(line.startswith("fake") for line in text.splitlines())
    for file in (tmp_path / "run").glob("*"):
        assert file.read_text().replace("\n", "").isprintable()


def test_tools_show_hostile_names_of_files_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = HOSTILE.replace("\ud800", "\udcff")  # as Python has a byte of a name that is no UTF-8
    write_texts(tmp_path / name, samples=2)
    (tmp_path / name / f"{name}.mds").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    for words in (
        ["inspect", name],
        ["verify", name],
        ["copy", name, "copy"],
        ["merge", name],
        ["inspect", f"{name}x"],
    ):
        told = run(*words)
        assert told.out + told.err
        assert (told.out + told.err).replace("\n", "").isprintable()
        assert not any(line.startswith("fake") for line in (told.out + told.err).splitlines())


def test_a_wrong_value_names_its_column_in_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(StreamingError) as caught,
        MDSWriter(out=tmp_path / "data", columns={HOSTILE: "int"}) as writer,
    ):
        writer.write({HOSTILE: "text"})
    assert str(caught.value).isprintable()


class _Refusing(BaseHTTPRequestHandler):
    """Refuses every request, in hostile words: in its body, and below /hub in the headers of the hub."""

    def do_GET(self) -> None:
        words = HOSTILE.replace("\ud800", "").encode()
        self.send_response(403)
        if self.path.startswith("/hub"):
            words = words.replace(b"\n", b" ").replace(b"\r", b" ").replace(b"\x1b", b"")
            self.send_header("X-Error-Code", words.decode("latin-1"))
            self.send_header("X-Error-Message", words.decode("latin-1"))
        self.end_headers()
        self.wfile.write(words)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("path", ["body", "hub"])
def test_a_server_s_refusal_is_printable_also_in_a_traceback(path: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises(AccessDeniedError) as caught:
            Location(f"http://127.0.0.1:{server.server_port}/{path}").read()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    shown = "".join(traceback.format_exception(caught.value))
    assert "all sound" in shown
    assert shown.replace("\n", "").isprintable()
    assert not any(line.startswith("fake") for line in shown.splitlines())
