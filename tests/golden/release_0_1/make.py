"""How the files beside this one were made, with release 0.1 itself: ``python -m tests.golden.release_0_1.make``.

    data/           the samples of all runs: two datasets
    <kind>.ckpt     checkpoints of Lightning, of the runs in runs.py
    loader.json     what ``StreamingDataLoader.state_dict()`` gave
    accelerate/     what ``Accelerator.save_state`` wrote
    said.json       what ``cache info`` and ``inspect`` said of the two
    after.json      for each of these, what the uninterrupted run reads after the save: epoch and ids of each batch
    cache.tar.xz    "remote", a compressed dataset with hashes; "cache", what reading all of it left, with the index
                    parsed; and "times.json", the modification times of files of the cache, in nanoseconds

Not to be run again: what it makes with a later release says nothing about this one.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import tarfile
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import fsspec

from lightning_streaming import MDSWriter, StreamingDataset
from lightning_streaming.__main__ import main as command
from tests.golden.release_0_1.runs import MADE_WITH, SAMPLES, SaveAndStop, accelerated, fit, loader_of, read

HERE = Path(__file__).resolve().parent
REMOTE = "memory://release-0-1"
SAMPLES_OF_CACHE = 150
COMPARED = {
    "cache info": ["shards", "shards_present", "ours", "not_ours", "leftovers", "remote", "index"],
    "inspect": ["samples", "shards", "raw_bytes", "stored_bytes", "formats", "compressions"],
}


def main() -> None:
    """Make everything."""
    with tempfile.TemporaryDirectory() as directory:
        _make_states(Path(directory))
        _make_cache(Path(directory))


def _make_states(directory: Path) -> None:
    data = HERE / "data"
    for number, (name, samples) in enumerate(SAMPLES.items()):
        with MDSWriter(out=data / name, columns={"id": "int"}, size_limit=300) as writer:
            for index in range(samples):
                writer.write({"id": 1000 * number + index})
    after: dict[str, Any] = {}
    for kind, (batch_size, workers, batches) in MADE_WITH.items():
        whole = fit(kind, data, directory, batch_size, workers)
        before = fit(kind, data, directory, batch_size, workers, SaveAndStop(HERE / f"{kind}.ckpt", batches))
        assert before == whole[:batches]
        after[kind] = whole[batches:]
    whole = read(loader_of(data))
    loader = loader_of(data)
    after["loader"] = whole[len(read(loader, 31)) :]
    (HERE / "loader.json").write_text(json.dumps(loader.state_dict(), indent=1) + "\n")
    after["accelerate"] = whole[len(accelerated(data, HERE / "accelerate", save_after=29)) :]
    (HERE / "after.json").write_text(json.dumps(after) + "\n")


def _make_cache(directory: Path) -> None:
    remote, cache = directory / "remote", directory / "cache"
    # So long a name in each shard's entry makes an index large enough to be kept in its parsed form.
    columns = {"id": "int", "x" * 7000: "uint8"}
    with MDSWriter(out=remote, columns=columns, compression="zstd", hashes=["sha1", "xxh64"], size_limit=1) as writer:
        for index in range(SAMPLES_OF_CACHE):
            writer.write({"id": index, "x" * 7000: 0})
    assert (remote / "index.json").stat().st_size > 2**20
    filesystem = fsspec.filesystem("memory")
    filesystem.put(str(remote), "/release-0-1", recursive=True)
    os.environ["LIGHTNING_STREAMING_CACHE"] = str(cache)
    dataset = StreamingDataset(remote=REMOTE)
    assert [sample["id"] for sample in dataset[:]] == list(range(SAMPLES_OF_CACHE))
    dataset.close()
    said = {"cache info": _said("cache", "info")["caches"][0], "inspect": _said("inspect", str(remote))}
    kept = {command: {name: said[command][name] for name in names} for command, names in COMPARED.items()}
    (HERE / "said.json").write_text(json.dumps(kept, indent=1) + "\n")
    files = sorted(path for path in cache.rglob("*") if path.is_file())
    times = {str(path.relative_to(directory)): path.stat().st_mtime_ns for path in files}
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for folder in (remote, cache):
            tar.add(folder, folder.name, filter=_without_user)
        listed = json.dumps(times).encode()
        entry = tarfile.TarInfo("times.json")
        entry.size = len(listed)
        tar.addfile(entry, io.BytesIO(listed))
    (HERE / "cache.tar.xz").write_bytes(lzma.compress(text.getvalue(), preset=9))


def _said(*args: str) -> Any:
    with redirect_stdout(io.StringIO()) as printed:
        command([*args, "--json"])
    return json.loads(printed.getvalue())


def _without_user(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main()
