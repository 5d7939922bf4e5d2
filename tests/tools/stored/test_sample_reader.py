from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_streaming.errors import SampleIndexError
from lightning_streaming.tools.stored import sample_reader
from lightning_streaming.tools.stored.sample_reader import SampleReader, TooMuch, Unreadable
from lightning_streaming.tools.stored.stored_dataset import find_dataset, temporary_caches
from lightning_streaming.tools.viewing.viewed import statistics_of
from lightning_streaming.writing.writers import MDSWriter
from tests.servers import http_server
from tests.servers.stores import HttpStore, S3Bucket
from tests.tiers import examples
from tests.tools.running import write_texts
from tests.tools.viewing.asking import html, pages_of


@contextmanager
def reading(
    location: Path | str, options: dict[str, Any] | None = None, unsafe: bool = False, shard_format: str | None = None
) -> Iterator[SampleReader]:
    place = find_dataset(str(location), options or {}, shard_format)
    reader = SampleReader(place, place.cache(), place.read_index(), unsafe)
    try:
        yield reader
    finally:
        reader.close()


@pytest.fixture(scope="module", params=[None, "zstd"])
def texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("texts")
    write_texts(directory, 50, compression=request.param)
    return directory


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(30))
@given(numbers=st.sets(st.integers(0, 49)))
def test_samples_are_those_that_were_written(texts: Path, numbers: set[int]) -> None:
    with reading(texts) as reader:
        found = reader.read(sorted(numbers))
    assert found == [{"id": number, "text": f"text {number:03}"} for number in sorted(numbers)]


def test_places_are_counted_as_the_index_does(texts: Path) -> None:
    with reading(texts) as reader:
        sizes = reader.index.samples_per_shard().tolist()
        places = [(shard, at) for shard, size in enumerate(sizes) for at in range(size)]
        assert [reader.find(number) for number in range(50)] == places
        assert [reader.first_of(shard) for shard in range(len(sizes))] == [
            places.index((n, 0)) for n in range(len(sizes))
        ]
        for bad in (-1, 50, 10**17):
            with pytest.raises(SampleIndexError, match="50 samples"):
                reader.find(bad)
        with pytest.raises(SampleIndexError):
            reader.first_of(len(sizes))


def test_samples_beside_each_other_are_one_request(s3_bucket: S3Bucket, tmp_path: Path) -> None:
    write_texts(tmp_path, 50, size_limit=None)
    s3_bucket.put_all(tmp_path)
    with reading(s3_bucket.url, s3_bucket.options) as reader:
        reader.read(range(10, 22))
        assert len([name for name in s3_bucket.requests() if "shard" in name]) == 2  # where they are, and themselves
        reader.read(range(10, 22))
        reader.read([15])
        assert len([name for name in s3_bucket.requests() if "shard" in name]) == 2


def test_only_what_is_asked_for_is_held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sample_reader, "_MAX_CACHED", 3000)
    monkeypatch.setattr(sample_reader, "_MAX_TABLE_BYTES", 60)
    with MDSWriter(out=str(tmp_path), columns={"data": "bytes"}, size_limit=5000) as writer:
        for number in range(40):
            writer.write({"data": bytes([number]) * 900})
    with reading(tmp_path) as reader:
        for _ in range(2):
            assert [one["data"][0] for one in reader.read(range(40)) if isinstance(one, dict)] == list(range(40))
        assert sum(size for _, size in reader._samples.values()) <= 3000
        assert sum(len(table._offsets) * 4 for table in reader._tables.values()) <= 60


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_shard_that_unpacks_to_much_is_unpacked_when_that_is_asked_for(
    s3_bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    monkeypatch.setattr(sample_reader, "_MAX_UNPACKED", 100_000)
    with MDSWriter(out=str(tmp_path), columns={"data": "bytes"}, compression="zstd") as writer:
        for _ in range(20):
            writer.write({"data": bytes(10_000)})
    s3_bucket.put_all(tmp_path)
    with reading(*((s3_bucket.url, s3_bucket.options) if is_stored else (tmp_path,))) as reader:
        (found,) = reader.read([3])
        assert isinstance(found, TooMuch)
        assert "must be unpacked" in found.reason
        assert not [name for name in s3_bucket.requests() if "shard" in name]
        assert reader.read([3], force=True) == [{"data": bytes(10_000)}]


def test_offsets_that_are_much_are_fetched_when_that_is_asked_for(
    s3_bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_reader, "_MAX_FETCHED", 100)
    write_texts(tmp_path, 50, size_limit=None)
    s3_bucket.put_all(tmp_path)
    with reading(s3_bucket.url, s3_bucket.options) as reader:
        (found,) = reader.read([3])
        assert isinstance(found, TooMuch)
        assert "for the offsets of the samples" in found.reason
        assert not [name for name in s3_bucket.requests() if "shard" in name]
        assert reader.read([3], force=True) == [{"id": 3, "text": "text 003"}]
        assert reader.read([4]) == [{"id": 4, "text": "text 004"}]


def test_shards_that_are_much_together_are_fetched_when_that_is_asked_for(
    s3_bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    firsts, _ = _write_shards(tmp_path, compression="zstd")
    s3_bucket.put_all(tmp_path)
    with reading(s3_bucket.url, s3_bucket.options) as reader:
        stored = [shard.zip_data for shard in reader.index.shards]
        sizes = {file.basename: file.bytes for file in stored if file is not None}
        names = list(sizes)
        monkeypatch.setattr(sample_reader, "_MAX_FETCHED", sum(sizes[name] for name in names[:2]))
        found = reader.read(firsts)
        assert [isinstance(one, TooMuch) for one in found] == [number >= 2 for number in range(len(firsts))]
        assert isinstance(found[2], TooMuch)
        assert "in addition to other samples" in found[2].reason
        assert set(s3_bucket.requests()) & set(names) == set(names[:2])
        assert [one["id"] for one in reader.read(firsts, force=True) if isinstance(one, dict)] == firsts
        monkeypatch.setattr(sample_reader, "_MAX_FETCHED", 0)
        assert isinstance(reader.read([firsts[0] + 1])[0], TooMuch)  # it would be fetched again
        assert isinstance(reader.read([firsts[-1] + 1])[0], dict)  # it is here still


def _parquet(directory: Path, rows: int, size: int, in_group: int) -> None:
    values = [bytes([row]) * size for row in range(rows)]
    pyarrow.parquet.write_table(
        pyarrow.table({"data": values}), directory / "part.parquet", row_group_size=in_group, compression="none"
    )


def test_large_samples_of_another_format_are_read_when_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_reader, "_MAX_SAMPLE_BYTES", 2000)
    _parquet(tmp_path, 20, 5000, 5)
    with temporary_caches(), reading(tmp_path, shard_format="parquet") as reader:
        (found,) = reader.read([3])
        assert isinstance(found, TooMuch)
        assert "on average" in found.reason
        assert reader.read([3], force=True) == [{"data": b"\3" * 5000}]


def test_of_a_file_with_many_parts_one_counts_as_what_it_takes(
    s3_bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_reader, "_MAX_FETCHED", 50_000)
    _parquet(tmp_path, 100, 5000, 5)
    s3_bucket.put_all(tmp_path)
    with temporary_caches(), reading(s3_bucket.url, s3_bucket.options, shard_format="parquet") as reader:
        assert reader.read([33]) == [{"data": b"\x21" * 5000}]
        monkeypatch.setattr(sample_reader, "_MAX_FETCHED", 20_000)
        assert isinstance(reader.read([3])[0], TooMuch)


def test_what_decoded_samples_take_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_reader, "_MAX_CACHED", 30_000)
    _parquet(tmp_path, 20, 5000, 20)
    with temporary_caches(), reading(tmp_path, shard_format="parquet") as reader:
        reader.read(range(20))
        assert 0 < len(reader._samples) <= 6


def test_a_shard_over_http_is_read_by_ranges(http_store: HttpStore, tmp_path: Path) -> None:
    write_texts(tmp_path, 50)
    http_store.put_all(tmp_path)
    with reading(http_store.url, http_store.options) as reader:
        assert reader.read([49]) == [{"id": 49, "text": "text 049"}]
    assert all(entry.range for entry in http_store.log() if "shard" in entry.name)


def test_threads_may_ask_at_once(texts: Path) -> None:
    found: dict[int, Any] = {}
    with reading(texts) as reader:
        threads = [
            Thread(target=lambda number=number: found.update({number: reader.read([number])[0]}))
            for number in range(50)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert {number: sample["id"] for number, sample in found.items()} == {number: number for number in range(50)}


def test_statistics_look_at_all_parts_of_a_dataset(texts: Path) -> None:
    with reading(texts) as reader:
        told = statistics_of(reader, {"id": "int", "text": "str", "gone": "str"})
    assert told.samples > 30
    columns = {one.name: one for one in told.columns}
    assert columns["id"].kind == "number"
    assert float(dict(columns["id"].facts)["min"]) < 10
    assert float(dict(columns["id"].facts)["max"]) > 40
    assert columns["text"].kind == "text"
    assert dict(columns["text"].facts)["median characters"] == "8"
    assert columns["gone"].kind == "not read"


_EVERY: dict[str, tuple[str, list[Any]]] = {
    "whole": ("int", [1, 2]),
    "truth": ("json", [True, False]),
    "mixed": ("json", [1, "a"]),
    "nothing": ("json", [None, None]),
    "sometimes": ("json", [None, 3]),
    "list": ("json", [[1], [1, 2]]),
    "mapping": ("json", [{"<a>": 1}, {}]),
    "data": ("bytes", [b"", b"abc"]),
    "few": ("str", ["", ""]),
    "much": ("float64", [float("nan"), 1e308]),
    "exact": ("str_decimal", ["1.5", "2.5"]),
}


def test_statistics_of_every_kind(tmp_path: Path) -> None:
    from decimal import Decimal

    with MDSWriter(out=str(tmp_path), columns={name: encoding for name, (encoding, _) in _EVERY.items()}) as writer:
        for at in (0, 1):
            sample = {name: values[at] for name, (_, values) in _EVERY.items()}
            writer.write({**sample, "exact": Decimal(sample["exact"])})
    with reading(tmp_path) as reader:
        told = statistics_of(reader, {name: encoding for name, (encoding, _) in _EVERY.items()})
    kinds = {one.name: one.kind for one in told.columns}
    assert kinds == {
        "whole": "number",
        "truth": "boolean",
        "mixed": "number, text",
        "nothing": "nothing but null",
        "sometimes": "number",
        "list": "list",
        "mapping": "mapping",
        "data": "bytes",
        "few": "text",
        "much": "number",
        "exact": "other",
    }
    assert dict(next(one for one in told.columns if one.name == "sometimes").facts)["missing"] == "1 of 2"


_LARGE = 10**400


@pytest.mark.parametrize(
    ("encoding", "values", "facts"),
    [
        ("json", [_LARGE, 1, -3], {"min": "-3", "max": "1.00000e+400", "mean": "3.33333e+399", "different": "3"}),
        ("int", [2**62, 2**62 + 1], {"min": f"{2**62:,}", "max": f"{2**62 + 1:,}", "different": "2"}),
        ("json", [1.5, 2, 2.0], {"min": "1.5", "max": "2", "mean": "1.83333", "different": "2"}),
        ("float64", [float("nan"), float("nan"), 1.0], {"not finite": "2", "min": "1", "different": "2"}),
        ("float64", [1e308, 1e308, 1e308], {"mean": "1e+308", "too large for the chart": "3"}),
    ],
)
def test_statistics_of_numbers_are_exact(
    tmp_path: Path, encoding: str, values: list[Any], facts: dict[str, str]
) -> None:
    with MDSWriter(out=str(tmp_path), columns={"number": encoding}) as writer:
        for value in values:
            writer.write({"number": value})
    with reading(tmp_path) as reader:
        (column,) = statistics_of(reader, {"number": encoding}).columns
    assert dict(column.facts).items() >= facts.items()


def test_statistics_of_arrays_are_of_all_their_numbers(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"values": "ndarray"}) as writer:
        for number in range(3):
            values = np.zeros(10_000, np.int64)
            values[-1] = 2**60 + number
            writer.write({"values": values})
    with reading(tmp_path) as reader:
        (column,) = statistics_of(reader, {"values": "ndarray"}).columns
    facts = dict(column.facts)
    assert facts["min, mean, max"].startswith("0, ")
    assert facts["min, mean, max"].endswith(f"{2**60 + 2:,}")
    assert facts["in the chart"] == "up to 4,096 values of each sample, evenly"


def test_what_is_damaged_is_not_offered_to_be_read_all_the_same(tmp_path: Path) -> None:
    index = write_texts(tmp_path, 40)
    (tmp_path / index.shards[1].raw_data.basename).unlink()
    with reading(tmp_path) as reader:
        assert not any(one.can_force for one in statistics_of(reader, {"id": "int"}).skipped)
    assert "Read them all the same" not in html(pages_of(tmp_path), "s/0/columns")


def test_statistics_say_what_was_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_reader, "_MAX_SAMPLE_BYTES", 30)
    with MDSWriter(out=str(tmp_path), columns={"data": "bytes"}) as writer:
        for size in (5, 500):
            writer.write({"data": b"x" * size})
    with reading(tmp_path) as reader:
        told = statistics_of(reader, {"data": "bytes"})
        assert (told.samples, [(one.samples, one.can_force) for one in told.skipped]) == (1, [(1, True)])
        assert isinstance(reader.read([1])[0], TooMuch)
        assert statistics_of(reader, {"data": "bytes"}, force=True).samples == 2


def test_an_empty_dataset_has_no_statistics(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"id": "int"}):
        pass
    with reading(tmp_path) as reader:
        assert statistics_of(reader, {"id": "int"}).samples == 0


def test_statistics_reach_from_the_first_sample_of_a_shard_to_its_last(s3_bucket: S3Bucket, tmp_path: Path) -> None:
    write_texts(tmp_path, 400, size_limit=None)
    s3_bucket.put_all(tmp_path)
    for place, taken in (
        ((tmp_path,), "64 of 400 samples: in even steps over 1 shard"),
        (
            (s3_bucket.url, s3_bucket.options),
            "64 of 400 samples: up to 4 adjacent ones, in even steps over 1 shard",
        ),
    ):
        with reading(*place) as reader:
            told = statistics_of(reader, {"id": "int"})
        facts = dict(told.columns[0].facts)
        assert (told.taken, facts["min"], facts["max"], facts["different"]) == (taken, "0", "399", "64")


def _write_shards(directory: Path, **writer: Any) -> tuple[list[int], list[str]]:
    """Texts in several shards; the first sample of each, and their names."""
    index = write_texts(directory, 50, **writer)
    firsts = [sum(shard.samples for shard in index.shards[:number]) for number in range(len(index.shards))]
    assert len(firsts) > 3
    return firsts, [shard.raw_data.basename for shard in index.shards]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("fault", [{"fault": "status", "status": 500}, {"fault": "reset"}, {"fault": "truncate"}])
def test_a_shard_that_fails_leaves_the_others_alone(s3_bucket: S3Bucket, tmp_path: Path, fault: dict[str, Any]) -> None:
    firsts, names = _write_shards(tmp_path)
    s3_bucket.put_all(tmp_path)
    with reading(s3_bucket.url, s3_bucket.options) as reader:
        reader.dataset = replace(reader.dataset, attempts=1)
        s3_bucket.fail(names[1], **fault)
        found = reader.read(firsts)
        assert [isinstance(one, Unreadable) for one in found] == [number == 1 for number in range(len(firsts))]
        s3_bucket.heal()
        assert reader.read(firsts)[1] == {"id": firsts[1], "text": f"text {firsts[1]:03}"}


def test_a_store_that_sends_nothing_is_asked_once_for_all_shards_that_are_wanted(
    s3_bucket: S3Bucket, tmp_path: Path
) -> None:
    firsts, names = _write_shards(tmp_path)
    s3_bucket.put_all(tmp_path)
    with reading(s3_bucket.url, s3_bucket.options) as reader:
        reader.read(firsts[:1])
        patient, reader.dataset = reader.dataset, replace(reader.dataset, attempts=1, timeout=0.3)
        s3_bucket.fail("shard", "hang")
        found = reader.read(firsts)
        assert set(s3_bucket.requests()) & set(names) == set(names[:2])
        assert [isinstance(one, Unreadable) for one in found] == [False] + [True] * (len(firsts) - 1)
        assert isinstance(found[2], Unreadable)
        assert "just failed" in found[2].reason
        s3_bucket.heal()
        reader.dataset = patient
        assert reader.read(firsts)[2] == {"id": firsts[2], "text": f"text {firsts[2]:03}"}


@pytest.mark.nightly
def test_a_store_that_is_gone_or_asked_too_often_is_asked_once(http_store: HttpStore, tmp_path: Path) -> None:
    firsts, names = _write_shards(tmp_path)
    http_store.put_all(tmp_path)
    with reading(http_store.url, http_store.options) as reader:
        reader.dataset = replace(reader.dataset, attempts=1, timeout=5.0)  # for less than the store asks for
        http_store.fail("shard", "status", status=429, retry_after=60)
        found = reader.read(firsts)
        assert set(http_store.requests()) & set(names) == set(names[:1])
        assert all(isinstance(one, Unreadable) for one in found)
    with http_server(tmp_path) as url:
        place = find_dataset(url, {}, None)
        gone = SampleReader(place, place.cache(), place.read_index(), False)
    told = [one.reason for one in gone.read(firsts) if isinstance(one, Unreadable)]
    assert ["just failed" in words for words in told] == [False] + [True] * (len(firsts) - 1)


def test_statistics_that_lack_what_could_not_be_read_are_made_again(s3_bucket: S3Bucket, tmp_path: Path) -> None:
    _, names = _write_shards(tmp_path)
    s3_bucket.put_all(tmp_path)
    pages = pages_of(s3_bucket.url, s3_bucket.options)
    s3_bucket.fail(names[1], "status", status=500)
    assert "left out" in html(pages, "s/0/columns")
    s3_bucket.heal()
    assert "left out" not in html(pages, "s/0/columns")
    asked = len(s3_bucket.requests())
    html(pages, "s/0/columns")
    assert len(s3_bucket.requests()) == asked
