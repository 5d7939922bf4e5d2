"""The lengths of stored samples: right for every kind of column, counted once per node, by as little as will do."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_streaming import CSVWriter, MDSWriter
from lightning_streaming.cache import CacheConfig, ShardCache
from lightning_streaming.errors import ConfigError, DiskFullError, IntegrityError, StorageError, StreamingError
from lightning_streaming.formats.columns import ArrayLengths
from lightning_streaming.options.lengths import LengthsRequest
from lightning_streaming.selection import document_lengths as module
from lightning_streaming.selection import scanning
from lightning_streaming.selection.document_lengths import StreamLengths, document_lengths
from lightning_streaming.tokenizing.documents import DocumentTokenizer
from lightning_streaming.writing.merging import merge_recursive
from tests.helpers import write_shards
from tests.servers import FaultyStore, HttpStore, S3Bucket
from tests.tiers import examples
from tests.waits import told_at_once

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

TOKENS = LengthsRequest(column="tokens")


def cache_of(remote: Path | str, local: Path, **options: Any) -> ShardCache:
    return ShardCache(CacheConfig(name="x", remote=str(remote), local=str(local), **options))


def counted(root: Path, asked: LengthsRequest = TOKENS) -> StreamLengths:
    cache = cache_of(root, root.parent / "local")
    return document_lengths(asked, cache.read_index(), cache)


def kept(root: Path) -> Path:
    return root.parent / "local" / "selections"


def document(number: int) -> dict[str, Any]:
    """A sample of 1 to 900 tokens."""
    return {"tokens": np.zeros(number * 37 % 900 + 1, np.uint16)}


def lengths(samples: int) -> list[int]:
    return [len(document(number)["tokens"]) for number in range(samples)]


def write_documents(root: Path, sizes: list[int]) -> Path:
    return write_shards(root, sizes, {"tokens": "ndarray:uint16"}, document)


# --- what is counted ---

COLUMNS = {
    "array": "ndarray",
    "typed": "ndarray:int32",
    "fixed": "ndarray:uint8:6",
    "raw": "bytes",
    "text": "str",
    "meta": "json",
    "number": "uint16",
    "big": "str_int",
}


def _by_text(text: str, number: int) -> Any:
    return np.uint16(len(text)) + number


@settings(max_examples=examples(25), deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    columns=st.sets(st.sampled_from(sorted(COLUMNS)), min_size=1),
    in_place=st.booleans(),
)
def test_lengths_are_those_of_the_samples(sizes: list[int], seed: int, columns: set[str], in_place: bool) -> None:
    rng, count = np.random.default_rng(seed), sum(sizes)
    sizes_of = rng.integers(1, 400, (count, 4))
    samples = [
        {
            "array": np.zeros(one[0], rng.choice(["int8", "float64"])),
            "typed": np.zeros(one[1], np.int32),
            "fixed": np.zeros(6, np.uint8),
            "raw": bytes(4 * int(one[2] // 4)),
            "text": "ü" * int(one[3]),
            "meta": {"n": int(one[0])},
            "number": np.uint16(one[1]),
            "big": int(one[2]),
        }
        for one in sizes_of
    ]
    requests: dict[str, tuple[LengthsRequest, Any]] = {
        "array": (LengthsRequest(column="array"), lambda of: len(of["array"])),
        "typed": (LengthsRequest(column="typed"), lambda of: len(of["typed"])),
        "fixed": (LengthsRequest(column="fixed"), lambda of: 6),
        "raw": (LengthsRequest(column="raw", dtype="float32"), lambda of: len(of["raw"]) // 4),
        "number": (LengthsRequest(lengths="number"), lambda of: int(of["number"])),
        "big": (LengthsRequest(lengths="big"), lambda of: of["big"]),
        "text": (LengthsRequest(lengths=lambda text: len(text) // 3), lambda of: len(of["text"]) // 3),
        "meta": (LengthsRequest(lengths=lambda meta: len(meta)), lambda of: len(f'{{"n": {of["meta"]["n"]}}}')),
    }
    with TemporaryDirectory() as directory:
        root = write_shards(
            Path(directory) / "x",
            sizes,
            {name: COLUMNS[name] for name in sorted(columns)},
            lambda number: {name: samples[number][name] for name in columns},
        )
        cache = cache_of(root, root if in_place else root.parent / "local")
        for name in columns:
            asked, expected = requests[name]
            found = document_lengths(asked, cache.read_index(), cache)
            assert cache.reads_in_place == in_place
            assert found.values.tolist() == [expected(sample) for sample in samples]
            assert found.values.dtype == np.uint32
            assert found.num_tokens == sum(map(expected, samples))
            assert not found.values.flags.writeable


def test_shards_of_several_kinds_are_counted_each_in_its_way(tmp_path: Path) -> None:
    kinds = {"a": "ndarray:uint16", "b": "ndarray", "c": "ndarray:uint16:5"}
    for name, kind in kinds.items():
        with MDSWriter(out=str(tmp_path / "x" / name), columns={"tokens": kind}, size_limit=600) as writer:
            for number in range(9):
                writer.write({"tokens": np.zeros(5 if name == "c" else number + 1, np.uint16)})
    merge_recursive(str(tmp_path / "x"))
    assert counted(tmp_path / "x").values.tolist() == [*range(1, 10), *range(1, 10), *([5] * 9)]


def test_compressed_shards_and_text_formats_are_counted_too(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "x"), columns={"tokens": "ndarray:uint16"}, compression="zstd") as writer:
        for number in range(30):
            writer.write(document(number))
    assert counted(tmp_path / "x").values.tolist() == lengths(30)
    with CSVWriter(out=str(tmp_path / "other" / "y"), columns={"n": "int", "text": "str"}) as rows:
        for number in range(9):
            rows.write({"n": number, "text": "a" * number})
    assert counted(tmp_path / "other" / "y", LengthsRequest(lengths="n")).values.tolist() == list(range(9))
    by_text = LengthsRequest(lengths=lambda text: len(text) + 1)
    assert counted(tmp_path / "other" / "y", by_text).values.tolist() == list(range(1, 10))


# --- read from elsewhere ---


def afar(store: FaultyStore, local: Path, asked: LengthsRequest = TOKENS) -> StreamLengths:
    cache = cache_of(store.url, local, storage_options=store.options)
    return document_lengths(asked, cache.read_index(), cache)


def shard_requests(store: FaultyStore) -> list[str | None]:
    """The ranges of requests for shards."""
    return [entry.range for entry in store.log() if entry.method == "GET" and entry.name.startswith("shard.")]


@pytest.mark.parametrize("kind", ["http_store", "s3_bucket"])
def test_of_shards_elsewhere_the_heads_alone_are_read(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    store: HttpStore | S3Bucket = request.getfixturevalue(kind)
    root = write_documents(tmp_path / "x", [40] * 20)
    store.put_all(root)
    assert afar(store, tmp_path / "local").values.tolist() == lengths(800)
    ranges = shard_requests(store)
    assert len(ranges) == 20
    assert all(one is not None and one.startswith("bytes=0-") for one in ranges)
    read = sum(int(str(one).partition("-")[2]) + 1 for one in ranges)
    assert read < sum(path.stat().st_size for path in root.glob("shard.*")) / 4
    assert not list((tmp_path / "local").glob("shard.*"))
    assert afar(store, tmp_path / "local").values.tolist() == lengths(800)
    assert len(shard_requests(store)) == 20


def test_a_shard_that_is_here_is_not_asked_for(tmp_path: Path, http_store: HttpStore) -> None:
    http_store.put_all(write_documents(tmp_path / "x", [4] * 3))
    cache = cache_of(http_store.url, tmp_path / "local")
    with cache.hold(cache.read_index().shards[1]):
        pass
    http_store.fail("shard.00001", "status")
    assert document_lengths(TOKENS, cache.read_index(), cache).values.tolist() == lengths(12)


def test_what_offsets_do_not_tell_is_fetched(tmp_path: Path, http_store: HttpStore) -> None:
    columns = {"tokens": "ndarray:uint16", "text": "str"}
    make = lambda number: {**document(number), "text": "so"}  # noqa: E731
    http_store.put_all(write_shards(tmp_path / "x", [4] * 3, columns, make))
    assert afar(http_store, tmp_path / "local").values.tolist() == lengths(12)
    assert len(list((tmp_path / "local").glob("shard.*"))) == 3


def test_a_head_that_says_other_than_its_sample_is_looked_at_as_a_whole(tmp_path: Path, http_store: HttpStore) -> None:
    root = write_documents(tmp_path / "x", [4])
    path = root / "shard.00000.mds"
    data = path.read_bytes()
    start = int.from_bytes(data[4:8], "little") + 4
    path.write_bytes(data[:start] + bytes([2 << 2]) + data[start + 1 :])  # of two dimensions
    http_store.put_all(root)
    with pytest.raises(StreamingError, match=r"stream 'x': shard\.00000\.mds, sample 0"):
        afar(http_store, tmp_path / "local")


@pytest.mark.rotate(1)
@pytest.mark.parametrize("fault", ["truncate", "short", "status"])
def test_heads_that_do_not_arrive_are_errors_of_storage(tmp_path: Path, http_store: HttpStore, fault: str) -> None:
    http_store.put_all(write_documents(tmp_path / "x", [40] * 3))
    http_store.fail("shard.00001", fault, status=404)
    with pytest.raises(StorageError, match=r"stream 'x'.*shard\.00001"):
        afar(http_store, tmp_path / "local")
    http_store.heal()
    assert afar(http_store, tmp_path / "local").values.tolist() == lengths(120)


def test_a_damaged_shard_is_fetched_again_and_then_told(tmp_path: Path, http_store: HttpStore) -> None:
    columns = {"tokens": "ndarray:uint16", "text": "str"}
    make = lambda number: {**document(number), "text": "so"}  # noqa: E731
    root = write_shards(tmp_path / "x", [4] * 3, columns, make)
    http_store.put_all(root)
    whole = (root / "shard.00002.mds").read_bytes()
    http_store.put("shard.00002.mds", whole[:-3])
    with pytest.raises(IntegrityError, match=r"stream 'x'.*shard\.00002"):
        afar(http_store, tmp_path / "local")
    http_store.put("shard.00002.mds", whole)
    assert afar(http_store, tmp_path / "local").values.tolist() == lengths(12)


# --- what is refused ---


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (LengthsRequest(column="token"), r"did you mean 'tokens'\?"),
        (LengthsRequest(column="text"), "has encoding 'str', whose tokens cannot be counted"),
        (LengthsRequest(column="raw"), "has encoding 'bytes'; pass their dtype"),
        (LengthsRequest(column="tokens", dtype="uint8"), "leave dtype out"),
        (LengthsRequest(lengths="score"), "is a column of float32, not of whole numbers"),
        (LengthsRequest(lengths="numtokens"), "unknown column"),
        (LengthsRequest(lengths=lambda tokens: len(tokens)), "name columns of numbers, text, bytes or json"),
    ],
)
def test_what_the_data_cannot_tell_is_refused_before_a_shard_is_asked_for(
    tmp_path: Path, http_store: HttpStore, asked: LengthsRequest, told: str
) -> None:
    columns = {"tokens": "ndarray:uint16", "text": "str", "raw": "bytes", "score": "float32"}
    sample = {"tokens": np.zeros(3, np.uint16), "text": "", "raw": b"", "score": np.float32(3)}
    http_store.put_all(write_shards(tmp_path / "x", [2], columns, lambda _: sample))
    with pytest.raises(ConfigError, match=rf"stream 'x': .*{told}") as refused:
        afar(http_store, tmp_path / "local", replace(asked, group="token_budget"))
    group, _, field = (refused.value.option or "").partition(".")
    assert group == "token_budget"
    assert getattr(asked, field) is not None or field == "dtype"
    assert not shard_requests(http_store)


@pytest.mark.parametrize(
    ("encoding", "value", "asked", "told"),
    [
        ("int", -1, "n", "-1 tokens for sample 1 of shard.00001.mds"),
        ("int8", -1, "n", "-1 tokens for sample 1 of shard.00001.mds"),
        ("uint64", 2**32, "n", "4294967296 tokens for sample 1 of shard.00001.mds"),
        ("str_int", 10**30, "n", "tokens for sample 1 of shard.00001.mds"),
        ("int", -1, lambda n: n, "-1 tokens for sample 1 of shard.00001.mds"),
        ("int", 1, lambda n: n / 2, "failed on sample 0: TypeError"),
        ("int", 0, lambda n: 1 // n, "failed on sample 4: ZeroDivisionError"),
    ],
)
def test_what_is_no_length_is_told_with_its_sample(
    tmp_path: Path, encoding: str, value: Any, asked: Any, told: str
) -> None:
    root = write_shards(tmp_path / "x", [3, 3], {"n": encoding}, lambda number: {"n": value if number == 4 else 7})
    with pytest.raises(ConfigError) as refused:
        counted(root, LengthsRequest(lengths=asked, group="packing"))
    assert str(refused.value).startswith("stream 'x': ")
    assert told in str(refused.value)
    assert refused.value.option == "packing.lengths"


def test_the_largest_length_fits(tmp_path: Path) -> None:
    root = write_shards(tmp_path / "x", [2], {"n": "uint32"}, lambda number: {"n": 2**32 - 1})
    assert counted(root, LengthsRequest(lengths="n")).num_tokens == 2 * (2**32 - 1)


# --- once per node ---


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards whose lengths are read."""
    names: list[str] = []
    whole = ArrayLengths.read_remote

    def noted(self: ArrayLengths, *of: Any) -> Any:
        names.append(self.info.raw_data.basename)
        return whole(self, *of)

    monkeypatch.setattr(ArrayLengths, "read_remote", noted)
    monkeypatch.setattr(scanning, "SHARDS_AT_ONCE", 1)
    return names


def test_what_was_counted_is_mapped_by_whoever_asks_the_same(tmp_path: Path, looked_at: list[str]) -> None:
    root = write_documents(tmp_path / "x", [3] * 4)
    first = counted(root)
    assert (len(looked_at), first.cached_at) == (4, kept(root) / f"{first.key}.npy")
    again = counted(root)
    assert (len(looked_at), again.digest, again.num_tokens) == (4, first.digest, first.num_tokens)
    assert [path.name for path in kept(root).iterdir() if path.suffix != ".lock"] == [f"{first.key}.npy"]


def test_a_file_that_is_not_whole_is_made_anew(tmp_path: Path) -> None:
    root = write_documents(tmp_path / "x", [3] * 4)
    first = counted(root)
    path = first.cached_at
    assert path is not None
    del first
    whole = path.read_bytes()
    for damaged in (whole[:-1], b"", whole[:-20] + bytes(20)):
        path.write_bytes(damaged)
        assert counted(root).values.tolist() == lengths(12)
        assert path.read_bytes() == whole
    path.write_bytes(whole[:130] + bytes([whole[130] ^ 1]) + whole[131:])
    assert not counted(root).is_whole()


def test_documents_rewritten_in_place_are_counted_again(tmp_path: Path) -> None:
    def lengths_of(values: list[int]) -> list[int]:
        new = write_shards(tmp_path / "new", [2, 2], {"size": "int"}, lambda number: {"size": values[number]})
        (tmp_path / "x").mkdir(exist_ok=True)
        for path in new.iterdir():
            os.utime(path, (0, 0))
            path.replace(tmp_path / "x" / path.name)
        new.rmdir()
        cache = ShardCache(CacheConfig(name="x", remote=str(tmp_path / "x")))
        counted = document_lengths(LengthsRequest(lengths="size"), cache.read_index(), cache)
        return [int(length) for length in counted.values]

    assert lengths_of([1, 2, 3, 4]) == [1, 2, 3, 4]
    assert lengths_of([1, 2, 9, 4]) == [1, 2, 9, 4]


def test_a_stream_that_has_grown_keeps_what_was_counted(tmp_path: Path, looked_at: list[str]) -> None:
    root = tmp_path / "x"

    def append(first: int, stop: int, **mode: Any) -> None:
        with MDSWriter(out=str(root), columns={"tokens": "ndarray:uint16"}, size_limit=2000, **mode) as writer:
            for number in range(first, stop):
                writer.write(document(number))

    append(0, 20)
    before = counted(root)
    shards = len(looked_at)
    append(20, 33, mode="append")
    assert counted(root).values.tolist() == lengths(33)
    new = looked_at[shards:]
    assert 0 < len(new) < shards
    assert set(new).isdisjoint(looked_at[:shards])
    append(33, 50, mode="append")
    grown = counted(root)
    assert set(looked_at[shards + len(new) :]).isdisjoint(looked_at[: shards + len(new)])
    assert grown.values.tolist() == lengths(50)
    assert grown.head(20).digest == before.digest
    assert len(list(kept(root).glob("*.npy"))) == 3
    counted(root, LengthsRequest(column="tokens", dtype="uint16"))  # another request has its own
    assert len(set(looked_at)) < len(looked_at)


def test_lengths_of_other_data_are_not_taken_for_those_of_its_head(tmp_path: Path) -> None:
    first = counted(write_documents(tmp_path / "x", [3] * 4))
    columns, make = {"tokens": "ndarray:uint16"}, lambda number: {"tokens": np.zeros(number + 1, np.uint16)}
    other = write_shards(tmp_path / "other" / "x", [3] * 6, columns, make)
    kept(other).mkdir(parents=True)
    assert first.cached_at is not None
    (kept(other) / first.cached_at.name).write_bytes(first.cached_at.read_bytes())
    assert counted(other).values.tolist() == list(range(1, 19))


def _killed_after(root: Path, shards: int) -> None:
    """Begin to count, in a process that kills itself."""
    read, whole = 0, ArrayLengths.read_remote

    def deadly(self: ArrayLengths, *of: Any) -> Any:
        nonlocal read
        read += 1
        if read > shards:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, *of)

    vars(module)["_HEADS_AT_ONCE"] = 1
    type.__setattr__(ArrayLengths, "read_remote", deadly)
    counted(root)


def test_who_is_killed_has_counted_nothing_in_vain(tmp_path: Path, looked_at: list[str]) -> None:
    root = write_documents(tmp_path / "x", [3] * 12)
    child = multiprocessing.get_context("fork").Process(target=_killed_after, args=(root, 7))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(list(kept(root).glob("*.parts/*.npy"))) == 7
    assert not list(kept(root).glob("*.npy"))
    assert counted(root).values.tolist() == lengths(36)
    assert len(looked_at) == 5
    assert {path.suffix for path in kept(root).iterdir()} == {".lock", ".npy"}


def _killed_while_tokenizing(root: Path, request: LengthsRequest, shards: int) -> None:
    """Begin to tokenize, in a process that kills itself at a shard."""
    whole, begun = DocumentTokenizer.lengths, 0

    def deadly(self: DocumentTokenizer, rows: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun > shards:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, rows)

    type.__setattr__(DocumentTokenizer, "lengths", deadly)
    counted(root, request)


def test_a_process_that_is_killed_while_tokenizing_loses_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_shards(tmp_path / "x", [2] * 12, {"text": "str"}, lambda number: {"text": "a" * (1000 + number)})
    monkeypatch.setattr(module, "_MOST_BYTES_TOKENIZED_AT_ONCE", 4500)  # two shards, each a little above 2,000 bytes
    monkeypatch.setattr(scanning, "_MOST_THREADS", 1)
    request = LengthsRequest(lengths=DocumentTokenizer(tokenizer="bytes", text="text"))
    child = multiprocessing.get_context("fork").Process(target=_killed_while_tokenizing, args=(root, request, 9))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(list(kept(root).glob("*.parts/*.npy"))) == 4
    whole, again = DocumentTokenizer.lengths, 0

    def counting(self: DocumentTokenizer, rows: Any) -> Any:
        nonlocal again
        again += 1
        return whole(self, rows)

    monkeypatch.setattr(DocumentTokenizer, "lengths", counting)
    assert counted(root, request).values.tolist() == [1000 + number for number in range(24)]
    assert again == 4


def _count(root: Path, barrier: Any, noted: Any) -> None:
    def noting(n: int) -> int:
        os.write(noted, b".")
        return n

    barrier.wait()
    asked = LengthsRequest(lengths=noting)
    assert counted(root, asked).values.tolist() == list(range(24))


def test_processes_that_want_it_at_once_count_once(tmp_path: Path) -> None:
    root = write_shards(tmp_path / "x", [2] * 12, {"n": "int"}, lambda number: {"n": number})
    context = multiprocessing.get_context("fork")
    barrier, noted = context.Barrier(5), os.open(tmp_path / "noted", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    counters = [context.Process(target=_count, args=(root, barrier, noted)) for _ in range(5)]
    for counter in counters:
        counter.start()
    for counter in counters:
        counter.join()
    os.close(noted)
    assert [counter.exitcode for counter in counters] == [0] * 5
    assert (tmp_path / "noted").stat().st_size == 24


@pytest.mark.parametrize("refused", ["lock", "file"])
def test_where_nothing_may_be_written_they_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    root = write_documents(tmp_path / "x", [3] * 4)

    def denied(*_: Any) -> Any:
        raise StorageError("denied") if refused == "lock" else PermissionError("denied")

    monkeypatch.setattr(scanning, "selection_lock" if refused == "lock" else "adopt_file", denied)
    found = counted(root)
    assert (found.values.tolist(), found.cached_at) == (lengths(12), None)
    assert "is not writable: each process counts the tokens itself" in caplog.text


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_documents(tmp_path / "x", [3] * 4)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFullError, match=r"stream 'x': no space left in .*No space left on device"):
        counted(root)
    monkeypatch.undo()
    assert counted(root).values.tolist() == lengths(12)


def test_a_long_way_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(scanning, "SAMPLES_AT_ONCE", 10)
    with told_at_once(caplog, monkeypatch):
        counted(write_documents(tmp_path / "x", [3] * 5))
    assert (
        "counting the tokens of 15 samples of stream 'x' by column='tokens'; `lightning-streaming" in caplog.messages[0]
    )
    what = "counting the tokens of stream 'x' by column='tokens'"
    assert caplog.messages[-1].startswith(f"{what}: 15 of 15 samples, after ")


def test_another_process_takes_what_is_kept_under_a_known_name(tmp_path: Path) -> None:
    root = write_shards(tmp_path / "x", [4], {"n": "int"}, lambda number: {"n": number})
    cache = cache_of(root, tmp_path / "local")
    index = cache.read_index()
    first = document_lengths(LengthsRequest(lengths=lambda n: n + 1), index, cache)
    other = LengthsRequest(lengths=lambda n: n + 2)
    assert document_lengths(other, index, cache, key=first.key).values.tolist() == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match="gives other lengths in this process than in the process that started it"):
        document_lengths(other, index, cache, key="0" * 32)
