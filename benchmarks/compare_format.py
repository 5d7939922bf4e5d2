"""Random datasets, written and read by us and by MosaicML Streaming: all four ways, and the files compared.

Run from the root of the repository; ``--peers`` is the Python of an environment with mosaicml-streaming 0.13 and the
same version of Pillow:

    python -m benchmarks.compare_format --peers ~/peers/bin/python

Columns of every encoding, sizes of shards, compression, hashes and text formats are drawn at random. Each library
writes each dataset, and reads its own and the other's. Everything must come back as it was written, and the two must
have written the same files, byte for byte; only gzip, which holds the time, is compared decompressed. Prints how many
are equal, shows each that differs, and fails if one does.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.random_datasets import FLOATS, NUMBERS, RandomDataset, jpeg_file, make_dataset

WRITERS = {"mds": "MDSWriter", "json": "JSONWriter", "csv": "CSVWriter", "tsv": "TSVWriter", "xsv": "XSVWriter"}
PACKAGES = {"ours": "lightning_streaming", "theirs": "streaming"}


# --- what must come back ---


def as_read(encoding: str, value: Any) -> Any:
    """What a value must come back as: numbers have the column's dtype, and a JPEG file loses a little."""
    if encoding in (*NUMBERS, *FLOATS):
        return np.dtype(encoding).type(value)
    if encoding == "jpeg":
        return Image.open(io.BytesIO(jpeg_file(value)))
    if encoding == "list[jpeg]":
        return [as_read("jpeg", one) for one in value]
    if encoding == "jpeg_array":
        return [Image.open(io.BytesIO(one)) for one in value]
    return value


def shown(value: Any) -> str:
    """A text that differs for any two values that differ."""
    if isinstance(value, Image.Image):
        return f"image {value.mode} {value.size} {value.tobytes().hex()}"
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype.newbyteorder('=')} {value.shape} {value.tobytes().hex()}"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return repr(value)


# --- what each library does, in its own environment ---


def write(package: str, dataset: RandomDataset, out: Path) -> None:
    """Write a dataset."""
    writer = getattr(importlib.import_module(package), WRITERS[dataset.format])
    with writer(out=str(out), columns=dataset.columns, **dataset.settings) as opened:
        for sample in dataset.samples:
            opened.write(sample)


def read_with_ours(directory: Path, scratch: Path) -> list[dict[str, Any]]:
    """All samples, by the dataset that users make."""
    ours = importlib.import_module("lightning_streaming")
    shards = json.loads((directory / "index.json").read_bytes())["shards"]
    if not any(shard["samples"] for shard in shards):
        return []  # a dataset of no samples cannot be trained on, and is refused
    local = {"local": str(scratch / "cache")} if shards[0]["compression"] else {}
    dataset = ours.StreamingDataset(remote=str(directory), **local, allow_unsafe_types=True)
    return [dataset[index] for index in range(dataset.size)]


def read_with_theirs(directory: Path, scratch: Path) -> list[dict[str, Any]]:
    """All samples, by the readers that their dataset uses."""
    reader_from_json = importlib.import_module("streaming.base.format").reader_from_json
    decompress = importlib.import_module("streaming.base.compression").decompress
    local, samples = scratch / "copy", []
    shutil.copytree(directory, local)
    for shard in json.loads((local / "index.json").read_bytes())["shards"]:
        for kind in ("data", "meta") if shard["compression"] else ():
            if shard.get(f"zip_{kind}"):
                packed = (local / shard[f"zip_{kind}"]["basename"]).read_bytes()
                raw = local / shard[f"raw_{kind}"]["basename"]
                raw.write_bytes(decompress(shard["compression"], packed))
        reader = reader_from_json(str(local), None, shard)
        reader.validate(True)
        samples += [reader[index] for index in range(shard["samples"])]
    return samples


READERS: dict[str, Callable[[Path, Path], list[dict[str, Any]]]] = {"ours": read_with_ours, "theirs": read_with_theirs}


def difference(dataset: RandomDataset, found: list[dict[str, Any]]) -> str | None:
    """The first value that did not come back; None if all did."""
    if len(found) != len(dataset.samples):
        return f"{len(dataset.samples)} samples were written, and {len(found)} read"
    for number, (sample, back) in enumerate(zip(dataset.samples, found, strict=True)):
        if sample.keys() != back.keys():
            return f"sample {number} has the columns {list(back)}"
        for name, encoding in dataset.columns.items():
            wanted, got = shown(as_read(encoding, sample[name])), shown(back[name])
            if wanted != got:
                return f"sample {number}, {name!r} ({encoding}): {wanted[:100]} was written, and {got[:100]} read"
    return None


def play(role: str, step: str, options: argparse.Namespace, root: Path) -> dict[int, str]:
    """Write all datasets as one library, or read all with it.

    Returns:
        What went wrong, by the number of the dataset.
    """
    wrong: dict[int, str] = {}
    for number in range(options.count):
        dataset = make_dataset(options.seed, number)
        try:
            if step == "write":
                write(PACKAGES[role], dataset, root / role / str(number))
                continue
            with tempfile.TemporaryDirectory(dir=root) as scratch:
                found = difference(dataset, READERS[role](root / step / str(number), Path(scratch)))
        except Exception as error:  # noqa: BLE001 - whatever a library raises is a difference
            found = f"{type(error).__name__}: {error}"
        if found is not None:
            wrong[number] = found
    return wrong


# --- the comparison ---


def files_differ(number: int, root: Path) -> str | None:
    """The first file that the two have not written alike; None if there is none."""
    ours, theirs = (_files(root / role / str(number)) for role in PACKAGES)
    if ours.keys() != theirs.keys():
        return f"files {sorted(ours)}, theirs {sorted(theirs)}"
    return next((f"{name} differs" for name in ours if ours[name] != theirs[name]), None)


def _files(directory: Path) -> dict[str, bytes]:
    """The files of a dataset; those of gzip decompressed, and without what the index says of them as packed."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()} if directory.is_dir() else {}
    packed = [name for name in files if name.endswith(".gz")]
    for name in packed:
        files[name] = gzip.decompress(files[name])
    if packed:
        index = json.loads(files["index.json"])
        for shard in index["shards"]:
            for kind in ("zip_data", "zip_meta"):
                shard[kind] = shard.get(kind) and shard[kind]["basename"]
        files["index.json"] = json.dumps(index).encode()
    return files


def run_peers(options: argparse.Namespace, step: str, root: Path) -> dict[int, str]:
    """:func:`play` their role in their environment."""
    asked = ["--count", str(options.count), "--seed", str(options.seed), "--play", step, str(root)]
    command = [options.peers, "-m", "benchmarks.compare_format", *asked]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    if done.returncode:
        raise SystemExit(f"{options.peers} failed:\n{done.stderr}")
    return {int(number): words for number, words in json.loads(done.stdout.splitlines()[-1]).items()}


def compare(options: argparse.Namespace, root: Path) -> Counter[str]:
    """Have both write and read everything, show what differs, and count."""
    wrong = {"written by us": play("ours", "write", options, root)}
    wrong["written by them"] = run_peers(options, "write", root)
    for author, by in (("ours", "us"), ("theirs", "them")):
        wrong[f"written by {by}, read by us"] = play("ours", author, options, root)
        wrong[f"written by {by}, read by them"] = run_peers(options, author, root)
    differing = {number: files_differ(number, root) for number in range(options.count)}
    wrong["files"] = {number: words for number, words in differing.items() if words is not None}
    counts: Counter[str] = Counter()
    for number in range(options.count):
        found = {what: words[number] for what, words in wrong.items() if number in words}
        dataset = make_dataset(options.seed, number)
        counts["DIFFERENT" if found else f"{dataset.format}: equal"] += 1
        counts["samples"] += len(dataset.samples)
        if found:
            print(f"dataset {number}, {dataset.format}, {dataset.columns}, {dataset.settings}:")
            print("".join(f"  {what}: {words}\n" for what, words in found.items()), end="")
    return counts


def main() -> int:
    """Compare; or, as the process that is started for it, play the other library's role once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="Python of an environment with mosaicml-streaming")
    parser.add_argument("--count", type=int, default=300, help="datasets to compare")
    parser.add_argument("--seed", type=int, default=0, help="of the random datasets")
    parser.add_argument("--play", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.play:
        print(json.dumps(play("theirs", options.play[0], options, Path(options.play[1]))))
        return 0
    if options.peers is None or shutil.which(options.peers) is None:
        parser.error(f"--peers must be a Python that has mosaicml-streaming, but is {options.peers}")
    with tempfile.TemporaryDirectory(prefix="compare-format-") as directory:
        counts = compare(options, Path(directory))
    print(f"| of {options.count} datasets with {counts.pop('samples')} samples | |\n|---|---:|")
    for verdict, count in sorted(counts.items()):
        print(f"| {verdict} | {count} |")
    return 1 if counts["DIFFERENT"] else 0


if __name__ == "__main__":
    sys.exit(main())
