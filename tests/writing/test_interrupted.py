"""Exceptions that come from outside, at any moment: no sample may be lost, or doubled, behind a valid index.

A writer is killed at any moment, and the next one goes on: the dataset is that of a writer that was never killed. Of an
append: that of an append that was never killed, and the shards that were there before are the very same files.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import fsspec
import pytest

from lightning_streaming import writing
from lightning_streaming.errors import ConfigError
from lightning_streaming.writing.destination import Destination
from lightning_streaming.writing.writers import MDSWriter
from tests.formats.golden_datasets import read_samples
from tests.servers import S3Store
from tests.tiers import kills
from tests.writing.killed import (
    Conversion,
    contents,
    leave_as_earlier,
    runs_to_its_end,
    samples,
    shard_marks,
    start,
)

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
        with pytest.raises(ConfigError, match="interrupted while it submitted a shard"):
            writer.finish()
        return interruptions, True
    finally:
        writer.close()
    return interruptions, False


@pytest.mark.rotate(1)
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
    opened, put = threading.Event(), Destination.put

    def put_later(self: Destination, name: str, *pieces: bytes | memoryview) -> None:
        assert opened.wait(30)
        put(self, name, *pieces)

    monkeypatch.setattr(Destination, "put", put_later)
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


@pytest.mark.rotate(2)
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


KILLED_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "raw": ("mds", {}),
    "compressed": ("mds", {"compression": "zstd", "hashes": ["sha1"]}),
    "two files": ("csv", {"compression": "zstd"}),
}


def conversion(out: Any, mode: str, kind: str, **more: Any) -> Conversion:
    shard_format, settings = KILLED_SETTINGS[kind]
    return Conversion(out=out, mode=mode, format=shard_format, settings={**settings, **more})


def with_places(tmp_path: Path, name: str, places: str) -> tuple[Any, dict[str, Any], list[Path]]:
    """``out``, more settings, and the directories in which the dataset is to be."""
    here, there = tmp_path / name / "here", tmp_path / name / "there"
    here.parent.mkdir()
    if places == "directory":
        return str(here), {}, [here]
    if places == "pair":
        return (str(here), str(there)), {}, [there]
    return (str(here), str(there)), {"keep_local": True}, [here, there]


@pytest.mark.rotate(1)
@pytest.mark.parametrize("kind", KILLED_SETTINGS)
@pytest.mark.parametrize("places", ["directory", "pair", "pair kept"])
def test_a_dataset_is_resumed_after_any_operation(kind: str, places: str, tmp_path: Path) -> None:
    expected = contents(conversion("", "create", kind).uninterrupted(tmp_path / "expected"))
    step = 7 if places != "directory" or kind != "raw" else 1
    for operations in count(0, step):
        out, more, directories = with_places(tmp_path, str(operations), places)
        job = conversion(out, "resume", kind, **more)
        is_done = runs_to_its_end(job, operations, tmp_path / str(operations))
        if (directories[0] / "index.json").exists():
            assert read_samples(directories[0], tmp_path / str(operations) / "scratch") == list(samples(job.samples))
        job.run()
        assert [contents(one) == expected for one in directories] == [True] * len(directories)
        if is_done:
            break
    assert operations > 40


@pytest.mark.rotate(1)
@pytest.mark.parametrize("kind", KILLED_SETTINGS)
@pytest.mark.parametrize("places", ["directory", "pair", "pair kept"])
@pytest.mark.parametrize("added", [3, 70])
def test_a_dataset_is_appended_to_after_any_operation(kind: str, places: str, added: int, tmp_path: Path) -> None:
    whole = conversion("", "append", kind)
    whole = replace(whole, samples=whole.begun + added)
    expected = contents(whole.uninterrupted(tmp_path / "expected"))
    step = 7 if places != "directory" or kind != "raw" else 1
    for operations in count(0, step):
        out, more, directories = with_places(tmp_path, str(operations), places)
        job = replace(conversion(out, "append", kind, **more), samples=whole.samples)
        job.begin()
        old = [shard_marks(one).items() for one in directories]
        is_done = runs_to_its_end(job, operations, tmp_path / str(operations))
        found = read_samples(directories[-1], tmp_path / str(operations) / "scratch")
        assert found in (list(samples(job.begun)), list(samples(job.samples)))
        job.run()
        assert [contents(one) == expected for one in directories] == [True] * len(directories)
        assert all(files <= shard_marks(one).items() for files, one in zip(old, directories, strict=True))
        if is_done:
            break
    assert operations > 10


@pytest.mark.nightly
def test_who_resumes_what_was_appended_to_is_in_nobodys_way(tmp_path: Path) -> None:
    job = conversion("", "append", "raw")
    expected = contents(job.uninterrupted(tmp_path / "expected"))
    outcomes = set()
    for operations in count():
        out = tmp_path / f"{operations}"
        one = replace(job, out=str(out))
        one.begin()
        is_done = runs_to_its_end(one, operations, out)
        try:
            replace(one, mode="resume", samples=one.begun).run()
            outcomes.add("finished")
        except ConfigError as error:
            assert (error.option, error.hint) == ("mode", "continue it with mode='append'")  # noqa: PT017 both outcomes are right
            outcomes.add("not finished")
        one.run()
        assert contents(out) == expected
        if is_done:
            break
    assert outcomes == {"finished", "not finished"}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["raw", "two files"])
def test_what_an_earlier_version_left_is_discarded_at_any_moment(kind: str, tmp_path: Path) -> None:
    job = conversion("", "append", kind)
    filled = replace(job, mode="create", samples=job.samples).uninterrupted(tmp_path / "filled")
    expected = contents(job.uninterrupted(tmp_path / "expected"))
    for operations in count(0, 1 if kind == "raw" else 5):
        out = tmp_path / f"{operations}"
        one = replace(job, out=str(out))
        one.begin()
        leave_as_earlier(out, filled)
        is_done = runs_to_its_end(one, operations, out)
        one.run()
        assert contents(out) == expected
        if is_done:
            break
    assert operations > 40


def test_the_source_may_have_grown_when_a_dataset_is_resumed(tmp_path: Path) -> None:
    job = conversion("", "resume", "raw")
    expected = contents(job.uninterrupted(tmp_path / "expected"))
    last = max(replace(job, samples=30).uninterrupted(tmp_path / "before").glob("shard.*")).name
    had_last = 0
    for operations in count():
        out = tmp_path / f"{operations}"
        runs_to_its_end(replace(job, out=str(out), samples=30), operations, out)
        if (out / "index.json").exists():
            break
        had_last += (out / last).exists()
        replace(job, out=str(out)).run()
        assert contents(out) == expected
    assert had_last


@pytest.mark.rotate(1)
@pytest.mark.parametrize("mode", ["resume", "append"])
def test_a_writer_may_be_killed_again_and_again(mode: str, tmp_path: Path) -> None:
    chosen = random.Random(3)
    for attempt, kind in enumerate([*KILLED_SETTINGS, *KILLED_SETTINGS]):
        job = conversion(str(tmp_path / f"{attempt}"), mode, kind)
        if mode == "append":
            job.begin()
        kills = 0
        while not runs_to_its_end(job, chosen.randrange(1, 60), tmp_path / f"{attempt}"):
            kills += 1
        assert contents(tmp_path / f"{attempt}") == contents(job.uninterrupted(tmp_path / f"{attempt} expected"))
        assert kills > 0


KILLS = kills(10, 30)


@pytest.mark.rotate(1)
@pytest.mark.parametrize("mode", ["resume", "append"])
def test_writers_are_killed_at_random_moments(mode: str, tmp_path: Path) -> None:
    expected = contents(conversion("", mode, "compressed").uninterrupted(tmp_path / "expected"))
    chosen, killed = random.Random(5), 0
    for attempt in count():
        job = replace(conversion(str(tmp_path / f"{attempt}"), mode, "compressed"), pause=0.002)
        if mode == "append":
            job.begin()
        killed += was_killed_after(job, chosen.uniform(0.01, 0.2))
        replace(job, pause=0.0).run()
        assert contents(tmp_path / f"{attempt}") == expected
        if killed == KILLS:
            break


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["resume", "append"])
def test_a_writer_to_a_bucket_is_killed_at_random_moments(mode: str, s3: S3Store, tmp_path: Path) -> None:
    expected = contents(conversion("", mode, "compressed").uninterrupted(tmp_path / "expected"))
    job = conversion(f"{s3.make_bucket()}/data", mode, "compressed", storage_options=s3.options)
    if mode == "append":
        job.begin()
    chosen = random.Random(7)
    killed = [was_killed_after(replace(job, pause=0.01), chosen.uniform(0.3, 1.5)) for _ in range(4)]
    assert any(killed)
    job.run()
    assert objects(job.out, s3) == expected


def was_killed_after(job: Conversion, seconds: float) -> bool:
    process = start(job)
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode != 0


def objects(url: str, s3: S3Store) -> dict[str, bytes]:
    store = fsspec.filesystem("s3", **s3.options, skip_instance_cache=True)
    root = url.removeprefix("s3://")
    return {path.removeprefix(f"{root}/"): store.cat_file(path) for path in store.find(root)}
