"""Damaged datasets by the thousand: reading them ends in samples or in our errors, and takes no more than it may.

    python -m tests.formats.fuzz --count 20000
    python -m tests.formats.fuzz --count 20000 --shards split

Each case is made from its number alone, so ``--first 1234 --count 1`` shows it again. A case is a golden dataset whose
index or one of whose files was changed; its index is read, every shard is checked, decompressed, opened and read to the
end, images to their pixels. It fails where anything but a StreamingError comes out, a file elsewhere is opened, it
takes 20 seconds, or Python sets aside more memory than the dataset's own size class. The process itself may take a
gigabyte.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import random
import resource
import signal
import struct
import sys
import tempfile
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from lightning_streaming.errors import FormatError, StreamingError
from lightning_streaming.files import join_under
from lightning_streaming.formats.algorithms import decompress
from lightning_streaming.formats.index import ShardInfo, parse_index
from lightning_streaming.formats.shard import check_shard, open_shard
from lightning_streaming.formats.shard_format import ShardReader
from tests.formats.golden_datasets import SERVED, SPLIT
from tests.golden import golden_path

NAMES = {"all": SERVED, "mds": tuple(name for name in SERVED if name not in SPLIT), "split": SPLIT}
"""The golden datasets to change, by what ``--shards`` says."""

SECONDS_PER_CASE = 20
PROCESS_BYTES = 2**30
SLACK_BYTES = 8 * 2**20
"""What reading may take at any size: pieces of decompression, and modules of Pillow when they are first needed."""
BYTES_PER_BYTE = 100
"""Python objects for each byte of a dataset: an index of ``[[[[`` becomes a list for each."""

_OWN = (tempfile.gettempdir(), str(Path(__file__).parents[2]), sys.prefix, sys.base_prefix, "/usr", "/dev", "/proc")
"""Directories in which files may be opened. Asked for here: in the hook it would wait for itself."""

_WORDS = (0, 1, 2, 3, 4, 8, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 7, 255, 2**31, 2**32 - 1, 2**32, 2**63, 10**400, 0.5, -0.0, 1e308, float("nan")),
    *("", "a", "é\ud800", "../x", "/etc/passwd", "a/../../b", "\0", "x" * 5000, "64mb", "9" * 400 + ".5kb"),
    *("mds", "json", "csv", "tsv", "xsv", "zstd", "br", "gz", "bz2", "snappy", "zstd:22", "sha1"),
    *("int", "str", "float", "bytes", "json", "pkl", "pil", "jpeg", "png", "jpeg_array", "list[pil]", "list[png]"),
    *("ndarray", "ndarray:uint8", "ndarray:float64:3,3", "ndarray:uint8:9999999999999999,9999999999999999"),
    *([], {}, [[]], ["a"] * 3, [8, None], {"a": "int"}, [[[[[[]]]]]]),
)


@dataclass(frozen=True)
class Case:
    """A dataset, as it was changed."""

    name: str
    index: bytes
    files: dict[str, bytes]
    """By basename."""
    columns: list[str] | None

    @property
    def size(self) -> int:
        return len(self.index) + sum(map(len, self.files.values()))


@cache
def golden(name: str) -> tuple[bytes, dict[str, bytes]]:
    """The index of a golden dataset, and its other files by basename."""
    root = golden_path("mds", name)
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return files.pop("index.json"), files


def make_case(number: int, names: Sequence[str] = SERVED) -> Case:
    """The case of this number, of one of some golden datasets."""
    rng = random.Random(number)
    name = rng.choice(names)
    index, files = golden(name)
    files = dict(files)
    columns = ["i"] if name == "pickle" else None  # reading damaged pickles could do anything
    kind = rng.choice(["tree", "tree", "text", "file", "file", "file", "file"])
    if kind == "text":
        index = damaged(rng, index)
    elif kind == "tree" or not files:
        index = with_changed_values(rng, index)
    else:
        basename = rng.choice(sorted(files))
        whole = files[basename]
        files[basename] = damaged(rng, whole)
        if rng.random() < 0.7:  # of the same size, so that its offsets may still be sound
            files[basename] = files[basename][: len(whole)].ljust(len(whole), b"\0")
        index = with_sizes_of(files, index) if rng.random() < 0.9 else index
    return Case(name, index, files, columns)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes with a few pieces changed, and at times cut out, doubled or moved."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(data) + 1)
        if rng.random() < 0.3:  # near the beginning, where headers and offsets are
            start = min(start, rng.randrange(64)) // 4 * 4
        stop = min(len(data), start + rng.choice([1, 1, 2, 4, 4, 8, 40]))
        old = data[start:stop]
        new = rng.choice(
            [
                bytes(byte ^ (1 << rng.randrange(8)) for byte in old),
                struct.pack("<I", rng.choice(_WORDS))[: len(old)] + old[4:],
                rng.randbytes(len(old)),
                rng.choice([old * 2, b"", rng.randbytes(3)]),
            ]
        )
        data = data[:start] + new + data[stop:]
    return data


def with_changed_values(rng: random.Random, text: bytes) -> bytes:
    """An index of which some values are others, gone, or numbers that are a little off."""
    tree = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(places(tree) or [({"": 0}, "")])  # all may be gone by now
        value = holder[key]
        if rng.random() < 0.1:
            del holder[key]
        elif type(value) is int and rng.random() < 0.5:
            holder[key] = value + rng.choice([-8, -1, 1, 4, 8])
        else:
            holder[key] = copy.deepcopy(rng.choice([rng.choice(_VALUES), rng.choice(places(tree) or [(0, 0)])[0]]))
    with suppress(RecursionError, ValueError):  # a tree that was put into itself; and a lone half of a character
        return json.dumps(tree).encode()
    return text


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(holder, key) of every value within a JSON tree."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    return [place for key in keys for place in [(tree, key), *places(tree[key])]]


def with_sizes_of(files: dict[str, bytes], text: bytes) -> bytes:
    """An index that tells the sizes of these files, so that what is wrong with them is found further in."""
    tree = json.loads(text)
    for shard in tree["shards"]:
        for key in ("raw_data", "zip_data", "raw_meta", "zip_meta"):
            if shard.get(key) and shard[key]["basename"] in files:
                shard[key]["bytes"] = len(files[shard[key]["basename"]])
    return json.dumps(tree).encode()


def read_case(case: Case, directory: Path, samples: Counter[str]) -> int:
    """Read all that can be read of a case.

    Args:
        case: The dataset.
        directory: Where to put it.
        samples: Is added to: how each sample ended, "read" or the name of an error.

    Returns:
        How many bytes were decompressed.
    """
    for basename, data in case.files.items():
        path = directory / basename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    unpacked = 0
    for shard in parse_index(case.index, "index.json").shards:
        check_shard(shard, columns=case.columns)
        unpacked += unpack(shard, directory)
        read_shard(shard, directory, case.columns, samples)
    return unpacked


def unpack(shard: ShardInfo, directory: Path) -> int:
    """Decompress the files of a shard, as a node's cache does when they have arrived."""
    unpacked = 0
    for raw, compressed in shard.files if shard.compression else ():
        assert compressed is not None
        path = join_under(directory, compressed.basename)
        if path.is_file() and path.stat().st_size == compressed.bytes:
            data = decompress(str(shard.compression), path.read_bytes(), raw.bytes)
            with suppress(OSError):  # a directory in its place
                join_under(directory, raw.basename).write_bytes(data)
            unpacked += len(data)
    return unpacked


def read_shard(shard: ShardInfo, directory: Path, columns: Sequence[str] | None, samples: Counter[str]) -> None:
    """Read what can be read of a shard, sample by sample, and count how each ended."""
    reader = open_shard(shard, directory, columns=columns)
    for index in range(len(reader)):
        samples[ending_of(reader, index)] += 1
    reader.close()


def ending_of(reader: ShardReader, index: int) -> str:
    """How reading a sample ends: "read", or the name of an error."""
    try:
        for value in reader[index].values():
            load_images(value)
    except FormatError as error:
        return type(error).__name__
    return "read"


def load_images(value: Any) -> None:
    """Decode the pixels of an image, or of each in a list; they are opened only."""
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, Image.Image):
            one.load()


def run_case(case: Case, samples: Counter[str], read: Callable[[Case, Path, Counter[str]], int] = read_case) -> str:
    """Run a case.

    Args:
        case: The dataset.
        samples: Is added to: how each of its samples ended.
        read: What to do with it.

    Returns:
        How it ended: "read", or the name of one of our errors.

    Raises:
        AssertionError: It took too much memory.
        Exception: It ended in an error that is not ours.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        unpacked = 0
        tracemalloc.start()
        try:
            unpacked = read(case, Path(scratch), samples)
            ending = "read"
        except StreamingError as error:
            ending = type(error).__name__
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    allowed = SLACK_BYTES + BYTES_PER_BYTE * (case.size + unpacked)
    assert peak <= allowed, f"{peak} bytes were set aside for {case.size} bytes of {case.name}; {allowed} are allowed"
    return ending


def refuse_files_elsewhere(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: nothing is opened but the case's own files, and Python's."""
    if event != "open" or not isinstance(arguments[0], str):
        return
    path = str(Path(arguments[0]).absolute())
    assert path.startswith(_OWN), f"{path} was opened"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run many cases; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000, help="cases to run")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--shards", choices=list(NAMES), default="all", help="of MDS, of two files each, or both")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # Pillow's, of damaged images
    resource.setrlimit(resource.RLIMIT_AS, (vm_bytes() + PROCESS_BYTES, resource.RLIM_INFINITY))
    names = NAMES[options.shards]
    for name in names:
        golden(name)  # which are elsewhere
    sys.addaudithook(refuse_files_elsewhere)
    endings, samples = Counter[str](), Counter[str]()
    number = options.first
    # A signal, and not a thread that watches: one that begins while tracemalloc does can crash Python.
    faulthandler.register(signal.SIGALRM, chain=True)  # shows where it hangs, and then ends the process
    try:
        for number in range(options.first, options.first + options.count):
            signal.alarm(SECONDS_PER_CASE)
            endings[run_case(make_case(number, names), samples)] += 1
    except BaseException:
        sys.stderr.write(f"case {number}, {make_case(number, names).name}:\n")
        raise
    signal.alarm(0)
    sys.stdout.write(f"{told(endings, 'cases')}\n{told(samples, 'samples')}\n")
    return 0


def told(endings: Counter[str], what: str) -> str:
    """How many there were, and how they ended, in one line."""
    counts = ", ".join(f"{count} {ending}" for ending, count in endings.most_common())
    return f"{endings.total()} {what}: {counts}"


def vm_bytes() -> int:
    """Address space that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
