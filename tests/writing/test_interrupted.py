"""Exceptions that come from outside, at any moment: no sample may be lost, or doubled, behind a valid index."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest

from lightning_streaming import writing
from lightning_streaming.errors import ConfigError
from lightning_streaming.writing.place import Directory
from lightning_streaming.writing.writer import MDSWriter
from tests.formats.golden_datasets import read_samples
from tests.writing.killed import contents

SAMPLES = 8
SETTINGS: dict[str, Any] = {"columns": {"id": "int"}, "size_limit": 200, "max_workers": 1}  # 2 to a shard
_CODE = str(Path(writing.__file__).parent)


class Interrupted(BaseException):
    """What a handler of a signal raises."""


@contextmanager
def interrupted_at(moments: Iterator[int], at: int) -> Iterator[None]:
    """Raise in this thread, in the package's code, at moment number ``at``; ``moments`` counts them on.

    Signals are handled where a function begins, and where one that is written in C returns.
    """

    def profile(frame: FrameType, event: str, _: object) -> None:
        is_ours = frame.f_code.co_filename.startswith(_CODE)
        if is_ours and event in ("call", "c_return") and next(moments) == at:
            raise Interrupted

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


def write_with_an_interruption(out: Path, mode: Any, at: int) -> tuple[int, bool]:
    """Write the dataset; repeat what was interrupted.

    Returns:
        How often it was interrupted, and whether the writer refused to go on; then it must not publish.
    """
    moments, interruptions = count(), 0

    def again_if_interrupted(step: Callable[[], None]) -> None:
        nonlocal interruptions
        try:
            with interrupted_at(moments, at):
                step()
        except Interrupted:
            interruptions += 1
            step()

    writer = MDSWriter(out=str(out), mode=mode, **SETTINGS)
    try:
        for number in range(SAMPLES):
            again_if_interrupted(partial(writer.write, {"id": number}))
        again_if_interrupted(writer.finish)
    except ConfigError:
        with pytest.raises(ConfigError, match="interrupted just as it gave a shard away"):
            writer.finish()
        return interruptions, True
    finally:
        writer.close()
    return interruptions, False


@pytest.mark.parametrize("mode", ["create", "resume"])
def test_an_interruption_at_any_moment_loses_nothing(mode: Literal["create", "resume"], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert write_with_an_interruption(out, mode, -1) == (0, False)
    expected = contents(out)
    outcomes = set()
    for at in count(0, 1 if mode == "create" else 3):
        shutil.rmtree(out, ignore_errors=True)
        interruptions, is_refused = write_with_an_interruption(out, mode, at)
        outcomes.add(is_refused)
        if is_refused and mode == "resume":
            go_on(out)
        elif is_refused:
            assert not out.exists()
            continue
        assert contents(out) == expected
        if interruptions == 0:
            break
    assert outcomes == {True, False}


def go_on(out: Path) -> None:
    """Go on with what a writer left that refused to go on."""
    assert not (out / "index.json").exists()
    with MDSWriter(out=str(out), mode="resume", **SETTINGS) as writer:
        for number in range(writer.num_samples, SAMPLES):
            writer.write({"id": number})


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is stored before this is set."""
    opened, put = threading.Event(), Directory.put

    def put_later(self: Directory, name: str, *pieces: bytes | memoryview) -> None:
        assert opened.wait(30)
        put(self, name, *pieces)

    monkeypatch.setattr(Directory, "put", put_later)
    yield opened
    opened.set()


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise Interrupted, from a signal, after so long."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("mode", ["create", "resume"])
def test_waiting_for_room_may_be_interrupted(
    mode: Literal["create", "resume"], gate: threading.Event, tmp_path: Path
) -> None:
    written = 0
    with MDSWriter(out=str(tmp_path / "out"), mode=mode, **SETTINGS) as writer:
        for _ in range(4):  # more than there is room for
            with suppress(Interrupted), alarm(0.1):
                while True:
                    writer.write({"id": written})
                    written += 1
        assert written < SAMPLES
        gate.set()
        for number in range(written, 50):
            writer.write({"id": number})
    assert [sample["id"] for sample in read_samples(tmp_path / "out", tmp_path)] == list(range(50))


@pytest.mark.parametrize("samples", [1, 3, 5])
def test_finishing_may_be_interrupted(samples: int, gate: threading.Event, tmp_path: Path) -> None:
    writer = MDSWriter(out=str(tmp_path / "out"), **SETTINGS)
    for number in range(samples):
        writer.write({"id": number})
    for _ in range(2):
        with pytest.raises(Interrupted), alarm(0.1):
            writer.finish()
    gate.set()
    writer.finish()
    writer.close()
    assert [sample["id"] for sample in read_samples(tmp_path / "out", tmp_path)] == list(range(samples))


def test_what_is_being_finished_takes_no_more_samples(gate: threading.Event, tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "out"), **SETTINGS) as writer:
        writer.write({"id": 0})
        with pytest.raises(Interrupted), alarm(0.1):
            writer.finish()
        with pytest.raises(ConfigError, match="is being finished and takes no more samples"):
            writer.write({"id": 1})
        gate.set()
    assert [sample["id"] for sample in read_samples(tmp_path / "out", tmp_path)] == [0]


def test_giving_up_may_be_interrupted(gate: threading.Event, tmp_path: Path) -> None:
    writer = MDSWriter(out=str(tmp_path / "out"), **SETTINGS)
    for number in range(5):
        writer.write({"id": number})
    with pytest.raises(Interrupted), alarm(0.1):
        writer.close()
    with pytest.raises(ConfigError, match="finished"):
        writer.write({"id": 5})
    gate.set()
    writer.close()
    assert not (tmp_path / "out").exists()
    with MDSWriter(out=str(tmp_path / "out"), **SETTINGS):  # the lock is given back
        pass
