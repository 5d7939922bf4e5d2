"""A writer is killed at any moment, and the next one goes on: the dataset is that of a writer that was never killed."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.formats.golden_datasets import read_samples
from tests.servers import S3Store
from tests.writing.killed import Conversion, contents, runs_to_its_end, samples, start

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "raw": ("mds", {}),
    "compressed": ("mds", {"compression": "zstd", "hashes": ["sha1"]}),
    "two files": ("csv", {"compression": "zstd"}),
}
BEFORE = 50
"""Samples of a dataset that is appended to; its last shard is not full."""


def conversion(out: Any, mode: str, kind: str, **more: Any) -> Conversion:
    shard_format, settings = SETTINGS[kind]
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


@pytest.mark.parametrize("kind", SETTINGS)
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


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("places", ["directory", "pair", "pair kept"])
@pytest.mark.parametrize("added", [3, 70])
def test_a_dataset_is_appended_to_after_any_operation(kind: str, places: str, added: int, tmp_path: Path) -> None:
    whole = replace(conversion("", "create", kind), samples=BEFORE + added)
    expected = contents(whole.uninterrupted(tmp_path / "expected"))
    step = 7 if places != "directory" or kind != "raw" else 1
    for operations in count(0, step):
        out, more, directories = with_places(tmp_path, str(operations), places)
        job = replace(conversion(out, "append", kind, **more), samples=BEFORE + added)
        replace(job, mode="create", samples=BEFORE).run()
        is_done = runs_to_its_end(job, operations, tmp_path / str(operations))
        if not (directories[-1] / ".writing" / "index.json").exists():  # then it is not decided, or it is done
            found = read_samples(directories[-1], tmp_path / str(operations) / "scratch")
            assert found in (list(samples(BEFORE)), list(samples(BEFORE + added)))
        job.run()
        assert [contents(one) == expected for one in directories] == [True] * len(directories)
        if is_done:
            break
    assert operations > 10


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


@pytest.mark.parametrize("mode", ["resume", "append"])
def test_a_writer_may_be_killed_again_and_again(mode: str, tmp_path: Path) -> None:
    chosen = random.Random(3)
    for attempt, kind in enumerate([*SETTINGS, *SETTINGS]):
        job = conversion(str(tmp_path / f"{attempt}"), mode, kind)
        if mode == "append":
            replace(job, mode="create", samples=BEFORE).run()
        kills = 0
        while not runs_to_its_end(job, chosen.randrange(1, 60), tmp_path / f"{attempt}"):
            kills += 1
        assert contents(tmp_path / f"{attempt}") == contents(job.uninterrupted(tmp_path / f"{attempt} expected"))
        assert kills > 0


@pytest.mark.parametrize("mode", ["resume", "append"])
def test_thirty_writers_are_killed_at_random_moments(mode: str, tmp_path: Path) -> None:
    expected = contents(conversion("", "create", "compressed").uninterrupted(tmp_path / "expected"))
    chosen, killed = random.Random(5), 0
    for attempt in count():
        job = replace(conversion(str(tmp_path / f"{attempt}"), mode, "compressed"), pause=0.002)
        if mode == "append":
            replace(job, mode="create", samples=BEFORE, pause=0.0).run()
        killed += was_killed_after(job, chosen.uniform(0.01, 0.2))
        replace(job, pause=0.0).run()
        assert contents(tmp_path / f"{attempt}") == expected
        if killed == 30:
            break


@pytest.mark.parametrize("mode", ["resume", "append"])
def test_a_writer_to_a_bucket_is_killed_at_random_moments(mode: str, s3: S3Store, tmp_path: Path) -> None:
    expected = contents(conversion("", "create", "compressed").uninterrupted(tmp_path / "expected"))
    job = conversion(f"{s3.make_bucket()}/data", mode, "compressed", storage_options=s3.options)
    if mode == "append":
        replace(job, mode="create", samples=BEFORE).run()
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
