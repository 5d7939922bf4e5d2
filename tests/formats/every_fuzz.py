"""Damaged files of every format by the thousand: each ends in the right values, or in our errors.

    python -m tests.formats.every_fuzz --format parquet --cases 10000

Each case is made from its number alone, so ``--first 1234 --cases 1`` shows it again. A case is the data of a form one
of whose files was changed: either before its index was made, or after that and under it. All of it is read. It fails

* where anything but a StreamingError comes out,
* where a sample differs from what it was, though none of the bytes that hold values did,
* where samples are missing, or others there,
* where it takes 20 seconds, more than a gigabyte of memory, or the life of its process.

Cases are run in forked processes, so that the end of one of these is seen.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import sys
import tarfile
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lightning_streaming.cache.config import CacheConfig
from lightning_streaming.cache.generated_index import generated_index
from lightning_streaming.cache.sources import FilePartUnpacker, InPlaceSource
from lightning_streaming.errors import FormatError, StreamingError
from lightning_streaming.files import join_under
from lightning_streaming.formats.columns import flat_column
from lightning_streaming.formats.index import ShardInfo, parse_index
from lightning_streaming.formats.shard import check_shard, may_be_flat, open_shard
from lightning_streaming.formats.shard_format import ShardReader
from lightning_streaming.formats.shard_table import PART
from lightning_streaming.storage import Location
from tests.formats.every_format import FORMS, PARQUET_SIZES, Sample, document_of, ranges, same, text_of
from tests.formats.fuzz import vm_bytes

SECONDS_PER_CASE = 20
PROCESS_BYTES = 2**30
_PER_PROCESS = 100
"""Cases after which another process goes on."""

_WORDS = (0, 1, 2, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
Read = Sample | StreamingError


# --- sound data ---


@dataclass(frozen=True)
class Sound:
    """Files as their writer left them, and what is read of them."""

    files: Mapping[str, bytes]
    options: Mapping[str, Any]
    index: bytes
    shards: list[list[Read]]
    values: Mapping[str, list[tuple[int, int]]]
    """Where in each file bytes lie whose change may change values, and nobody could tell."""


PARQUET_WAYS: Mapping[str, dict[str, Any]] = {
    "checksums": {"write_page_checksum": True},
    "checksums, version 2": {"write_page_checksum": True, "data_page_version": "2.0", "compression": "zstd"},
    "checksums, without dictionaries": {"write_page_checksum": True, "use_dictionary": False, "compression": "none"},
    "plain": {"compression": "none", "use_dictionary": False},
    "snappy": {"compression": "snappy"},
    "version 2": {"data_page_version": "2.0", "compression": "zstd", "data_page_size": 64},
    "differences": {
        "use_dictionary": False,
        "compression": "none",
        "column_encoding": {
            "id": "DELTA_BINARY_PACKED",
            "text": "DELTA_BYTE_ARRAY",
            "words.list.element": "DELTA_LENGTH_BYTE_ARRAY",
            "share": "BYTE_STREAM_SPLIT",
        },
    },
}


def write_wide_parquet(root: Path, **how: Any) -> None:
    """Columns of many types, with nulls."""
    import pyarrow.parquet

    kinds = {
        "id": pyarrow.int64(),
        "text": pyarrow.string(),
        "tokens": pyarrow.list_(pyarrow.int32()),
        "share": pyarrow.float32(),
        "flag": pyarrow.bool_(),
        "words": pyarrow.list_(pyarrow.string()),
        "pair": pyarrow.struct({"left": pyarrow.int16(), "right": pyarrow.binary()}),
        "grid": pyarrow.list_(pyarrow.list_(pyarrow.float64(), 2), 2),
        "when": pyarrow.timestamp("ms"),
    }
    schema = pyarrow.schema(list(kinds.items()))

    def row(number: int) -> Sample:
        return {
            "id": number,
            "text": text_of(number) or None,
            "tokens": document_of(number).tolist(),
            "share": number / 7,
            "flag": number % 3 == 0,
            "words": [f"w{number}"] * (number % 3),
            "pair": {"left": number, "right": bytes([number])} if number % 4 else None,
            "grid": [[number, 1.0], [2.0, number]],
            "when": number * 1000,
        }

    groups = ranges(PARQUET_SIZES)
    for first, stop in ((0, 3), (3, 5)):
        with pyarrow.parquet.ParquetWriter(root / f"{first}.parquet", schema, **how) as writer:
            for group in groups[first:stop]:
                writer.write_table(pyarrow.Table.from_pylist(list(map(row, group)), schema))


def ways_of(form: str) -> list[str]:
    """The ways in which files of a form are written, to be damaged in turn."""
    return list(PARQUET_WAYS) if form == "parquet" else [""]


@cache
def sound(form: str, way: str) -> Sound:
    """What is damaged."""
    with tempfile.TemporaryDirectory(prefix="every-") as made:
        root = Path(made) / "data"
        root.mkdir()
        if way:
            write_wide_parquet(root, **PARQUET_WAYS[way])
        else:
            FORMS[form].write(root)
        options = FORMS[form].options
        files = {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*"))}
        index = _index(root, options)
        shards = [read_shard(info, root, Path(made) / "raw") for info in parse_index(index, "index.json").shards]
        values = {name: _values(root / name, data, way) for name, data in files.items()}
    assert not any(isinstance(one, StreamingError) for shard in shards for one in shard)
    return Sound(files, options, index, shards, values)


def _values(path: Path, data: bytes, way: str) -> list[tuple[int, int]]:
    """Where bytes lie whose change may go unnoticed."""
    if path.suffix == ".npy":
        return [(10 + int.from_bytes(data[8:10], "little"), len(data))]
    if path.suffix == ".tar":
        with tarfile.open(path) as tar:
            return [(one.offset_data, one.offset_data + one.size) for one in tar]
    if path.suffix == ".parquet":  # all but the footer, where pages have no checksums
        return [] if "checksums" in way else [(4, len(data) - 8 - int.from_bytes(data[-8:-4], "little"))]
    if path.name.startswith("chunk-"):
        return [(4 * (int.from_bytes(data[:4], "little") + 2), len(data))]
    if path.suffix == ".idx":  # where documents begin is said once, and may be anywhere between two sequences
        return [(len(data) - 8 * int.from_bytes(data[26:34], "little"), len(data))]
    return [(0, len(data))] if path.suffix == ".bin" else []


# --- damage ---


@dataclass(frozen=True)
class Case:
    """Data one of whose files was changed."""

    number: int
    sound: Sound
    name: str
    """Of the changed file."""
    data: bytes
    """What is in it."""
    is_under: bool
    """Whether it was changed after the index was made."""

    def may_differ(self) -> bool:
        """Whether bytes of values are not what they were."""
        before = self.sound.files[self.name]
        if len(before) != len(self.data) and not self.name.endswith(".parquet"):
            return False
        both = min(len(before), len(self.data))
        changed = np.flatnonzero(np.frombuffer(before, np.uint8)[:both] != np.frombuffer(self.data, np.uint8)[:both])
        return any(((changed >= start) & (changed < stop)).any() for start, stop in self.sound.values[self.name])


def make_case(form: str, number: int) -> Case:
    """The case of this number."""
    rng = random.Random(f"{form} {number}")
    ways = ways_of(form)
    found = sound(form, ways[number % len(ways)])
    name = rng.choice(sorted(found.files))
    whole = found.files[name]
    data = whole
    while data == whole:
        data = damaged(rng, whole, _focus(rng, name, whole))
        if rng.random() < 0.7:
            data = data[: len(whole)].ljust(len(whole), b"\0")
    return Case(number, found, name, data, rng.random() < 0.5)


def _focus(rng: random.Random, name: str, data: bytes) -> tuple[int, int]:
    """Where to do damage: of Parquet often in the footer, of others often where they begin."""
    if name.endswith(".parquet"):
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        return rng.choice([(0, len(data)), (0, footer), (footer, len(data)), (footer, len(data) - 8)])
    return rng.choice([(0, len(data)), (0, len(data)), (0, min(600, len(data)))])


def damaged(rng: random.Random, data: bytes, focus: tuple[int, int]) -> bytes:
    """Bytes that were flipped, overwritten, cut out or off, added, doubled, or swapped with others."""
    first, last = focus
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        start = rng.randrange(first, last)
        stop = min(last, len(data), start + rng.choice([1, 1, 1, 2, 4, 8, 64, 512]))
        old = data[start:stop]
        other = rng.randrange(first, last)
        kind = rng.randrange(8)
        if kind <= 2:
            new = bytes([old[0] ^ (1 << rng.randrange(8))]) + old[1:] if old else b""
        elif kind == 3:
            new = rng.choice(_WORDS).to_bytes(4, "little")[: len(old)] + old[4:]
        elif kind == 4:
            new = rng.randbytes(len(old))
        elif kind == 5:
            new = rng.choice([old * 2, b"", rng.randbytes(3), bytes(len(old))])
        elif kind == 6 and other >= stop:
            new = data[other : other + len(old)] + data[stop:other] + old
            stop = other + len(old)
        else:
            new, stop = b"", rng.choice([stop, len(data)])
        data = data[:start] + new + data[stop:]
    return data


# --- reading ---


def _index(root: Path, options: Mapping[str, Any]) -> bytes:
    return generated_index(Location(str(root)), options["format"], options.get("block_length"))


def read_shard(info: ShardInfo, root: Path, scratch: Path) -> list[Read]:
    """Every sample of a shard, or the error that it ends in.

    Raises:
        StreamingError: The shard as a whole cannot be read.
    """
    check_shard(info)
    directory = root if info.compression is None else scratch
    if info.zip_data is not None:
        _unpack(info, root, scratch)
    reader = open_shard(info, directory)
    try:
        read = [_sample_or_error(reader, place) for place in range(len(reader))]
        if may_be_flat(info) and "tokens" in info.schema["column_names"]:
            with suppress(FormatError):
                _check_flat(flat_column(reader, info, "tokens"), read)
        return read
    finally:
        reader.close()


def _sample_or_error(reader: ShardReader, place: int) -> Read:
    try:
        return reader[place]
    except FormatError as error:
        return error


def _unpack(info: ShardInfo, root: Path, scratch: Path) -> None:
    """As the cache does."""
    assert info.zip_data is not None
    source, path = InPlaceSource(root, CacheConfig(name="0", local=root)), join_under(scratch, info.raw_data.basename)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(info.raw_data.bytes)
    if info.compression == PART:
        FilePartUnpacker().unpack(info, source.stored(info.zip_data), path)
    else:
        source.unpack_raw(info.raw_data, info.zip_data, str(info.compression), path)


def _check_flat(flat: Any, read: Sequence[Read]) -> None:
    """Tokens where a flat column says that they are must be those of the samples."""
    for sample, start, count in zip(read, flat.starts.tolist(), flat.counts.tolist(), strict=True):
        if not isinstance(sample, StreamingError):
            found = np.frombuffer(flat.data, flat.dtype, count, start)
            assert np.array_equal(found, sample["tokens"]), "a flat column has other tokens than its samples"


def run_case(case: Case) -> str:
    """Read all of a case; gives how it ended: what happened to the index, or to samples.

    Raises:
        AssertionError: A value is wrong.
        Exception: It ended in an error that is not ours.
    """
    with tempfile.TemporaryDirectory(prefix="every-") as made:
        root = Path(made) / "data"
        for name, data in {**case.sound.files, case.name: case.data}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        try:
            shards = parse_index(
                case.sound.index if case.is_under else _index(root, case.sound.options), "index.json"
            ).shards
        except StreamingError as error:
            return f"{_named(error)} when indexed"
        is_other = [info.schema for info in shards] != _schemas(case.sound)
        if not is_other:
            assert len(shards) == len(case.sound.shards), f"{len(shards)} shards instead of {len(case.sound.shards)}"
        endings = Counter[str]()
        for place, info in enumerate(shards):
            try:
                read = read_shard(info, root, Path(made) / "raw")
            except StreamingError as error:
                endings[_named(error)] += 1
                continue
            if not is_other:
                endings += _compared(case, info, read, case.sound.shards[place])
        return "another schema" if is_other else "+".join(sorted(endings)) or "no samples"


def _schemas(found: Sound) -> list[Mapping[str, Any]]:
    return [info.schema for info in parse_index(found.index, "index.json").shards]


def _named(error: StreamingError) -> str:
    assert not isinstance(error.__cause__, MemoryError), f"asked for too much memory: {error}"
    assert str(error), "an error that says nothing"
    return type(error).__name__


def _compared(case: Case, info: ShardInfo, read: Sequence[Read], expected: Sequence[Read]) -> Counter[str]:
    is_changed = case.name in {file.basename for file in info.stored}
    if is_changed and _ends_early(case):
        read = read[: max(0, min(len(read), len(expected)) - 1)]  # the last one may have lost members
        expected = expected[: len(read)]
    assert len(read) == len(expected), f"{len(read)} samples instead of {len(expected)}"
    endings = Counter[str]()
    for place, (found, sample) in enumerate(zip(read, expected, strict=True)):
        if isinstance(found, StreamingError):
            assert is_changed, f"a file that is sound: {found}"
            endings[_named(found)] += 1
        elif same(found, sample):
            endings["right"] += 1
        else:
            where = f"sample {place} of {info.raw_data.basename}"
            may_differ = is_changed and case.may_differ()
            assert may_differ, f"{where} is {found}, but was {sample}"
            endings["changed"] += 1
    return endings


def _ends_early(case: Case) -> bool:
    """Whether a tar file has a block of zeros, which is the mark of its end, where it had something else."""
    if not case.name.endswith(".tar"):
        return False
    before, after = case.sound.files[case.name], case.data
    blocks = (slice(place, place + 512) for place in range(0, min(len(before), len(after)), 512))
    return any(any(before[block]) and not any(after[block]) for block in blocks)


# --- many ---


def run_here(form: str, numbers: Sequence[int]) -> Counter[str]:
    """Run some cases in this process; how many ended how."""
    return Counter(run_case(make_case(form, number)) for number in numbers)


def _ending(form: str, number: int) -> tuple[str, str]:
    try:
        return run_case(make_case(form, number)), ""
    except Exception as error:  # noqa: BLE001 what fails is what is looked for
        return "", f"{type(error).__name__}: {error}"


def _run_all(form: str, numbers: Sequence[int], tell: Callable[[tuple[int, str, str]], None]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (vm_bytes() + PROCESS_BYTES, resource.RLIM_INFINITY))
    for number in numbers:
        tell((number, *_ending(form, number)))


def run_forked(form: str, numbers: Sequence[int]) -> Iterator[tuple[int, str, str]]:
    """Run cases in processes of their own; gives of each its number, how it ended, and what is wrong with that."""
    context = multiprocessing.get_context("fork")
    left = list(numbers)
    while left:
        some = left[:_PER_PROCESS]
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_run_all, args=(form, some, sender.send))
        child.start()
        sender.close()
        ended, why = 0, ""
        try:
            while ended < len(some):
                if not receiver.poll(SECONDS_PER_CASE):
                    why = f"took more than {SECONDS_PER_CASE} s"
                    break
                yield receiver.recv()
                ended += 1
        except EOFError:
            child.join()
            why = f"ended its process with {child.exitcode}"
        if why:
            yield some[ended], "", why
        child.kill()
        child.join()
        left = left[ended + bool(why) :]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run many cases; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=list(FORMS), required=True, help="what is damaged")
    parser.add_argument("--cases", type=int, default=1000, help="cases to run")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    for way in ways_of(options.format):
        sound(options.format, way)
    endings, failed = Counter[str](), 0
    for number, ending, wrong in run_forked(options.format, range(options.first, options.first + options.cases)):
        if wrong:
            failed += 1
            sys.stderr.write(f"case {number}: {wrong[:600]}\n")
        else:
            endings[ending] += 1
    sys.stdout.write(f"{options.cases} cases of {options.format}, {failed} failed:\n")
    for ending, count in endings.most_common():
        sys.stdout.write(f"{count:7} {ending}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
