"""How fast JPEG pictures become batches for training: decoded, a random part of each brought to 224 x 224 pixels.

Run from the root of the repository, on a machine that does nothing else:

    python -m benchmarks.pictures --peers ~/peers/bin/python

``--peers`` is the Python of an environment with litData and MosaicML Streaming; without it only this library and a
plain dataset are measured. Batches are of 64 tensors uint8 of shape (3, 224, 224), which torch's own collate stacks:

    ours       decode={"image": "encoded"}; the part is drawn before anything is decoded. Without workers, as many
               ``decode.threads`` as there are cores
    pillow     a torch dataset of files in a directory, decoded, cropped and resized by Pillow
    litdata    its StreamingDataset of bytes, and the same by Pillow in its transform
    mosaicml   its StreamingDataset of the MDS shards that we read, whose images are Pillow's

Every measurement is a fresh process that reads one epoch to warm up and then ``--epochs`` more, by workers that live
on. OMP_NUM_THREADS is 1 for all, as it is in workers. Systems alternate; medians of ``--rounds`` are shown: pictures a
second, and milliseconds of processor time a picture, of the process and its workers. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {"224": ((224, 224), 1024), "500": ((500, 375), 512), "1080p": ((1920, 1080), 128)}
"""Width and height, and how many pictures."""
PIXELS, BATCH_SIZE = 224, 64
OF_PEERS = ("litdata", "mosaicml")


def picture(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A JPEG file with shapes as large as those of photographs, and noise: 2.5 bits a pixel."""
    from PIL import Image

    shapes = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), np.uint8)
    large = np.asarray(Image.fromarray(shapes).resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = (large + rng.integers(-12, 13, large.shape, np.int16)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=88)
    return file.getvalue()


def write(root: Path, name: str, scale: float) -> None:
    """The same pictures as MDS shards and as files."""
    from lightning_streaming import MDSWriter

    (size, count), rng = SIZES[name], np.random.default_rng(5)
    (root / name / "files").mkdir(parents=True)
    with MDSWriter(out=root / name / "mds", columns={"image": "jpeg", "label": "int"}) as writer:
        for number in range(max(2 * BATCH_SIZE, int(count * scale))):
            file = picture(rng, *size)
            writer.write({"image": file, "label": number})
            (root / name / "files" / f"{number:05}.jpg").write_bytes(file)


def write_litdata(root: Path, name: str) -> None:
    """The same for litData."""
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(root / name / "litdata"), chunk_bytes="64MB")
    for number, path in enumerate(sorted((root / name / "files").iterdir())):
        writer[number] = {"image": path.read_bytes(), "label": number}
    writer.done()
    writer.merge()


def draw_box(size: tuple[int, int], rng: np.random.Generator) -> tuple[int, int, int, int]:
    """A part of a picture of 8 to 100 % of its area."""
    width, height = size
    while True:
        area, ratio = width * height * rng.uniform(0.08, 1), math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, upper = int(rng.integers(width - across + 1)), int(rng.integers(height - down + 1))
            return left, upper, left + across, upper + down


# --- what is measured ---


def ours_cropped(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Our transform."""
    return {**sample, "image": sample["image"].crop(draw_box(sample["image"].size, rng), PIXELS)}


def by_pillow(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """What the others do."""
    import torch
    from PIL import Image

    image = sample["image"] if isinstance(sample["image"], Image.Image) else Image.open(io.BytesIO(sample["image"]))
    part = image.convert("RGB").resize((PIXELS, PIXELS), Image.Resampling.BILINEAR, draw_box(image.size, rng))
    return {**sample, "image": torch.from_numpy(np.array(part)).permute(2, 0, 1).contiguous()}


class Files:
    """A map-style dataset of the files of a directory."""

    def __init__(self, root: Path) -> None:
        self._paths = sorted(root.iterdir())

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return by_pillow({"image": self._paths[number].read_bytes(), "label": number}, np.random.default_rng(number))


def loader_of(system: str, root: Path, workers: int) -> Iterable[Any]:
    """A system's loader, kept over epochs."""
    from torch.utils.data import DataLoader

    how: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": workers, "persistent_workers": workers > 0}
    if system == "ours":
        from lightning_streaming import StreamingDataLoader, StreamingDataset

        threads = 0 if workers else os.cpu_count() or 1
        asked: dict[str, Any] = {
            "decode": {"columns": {"image": "encoded"}, "threads": threads},
            "transform": ours_cropped,
        }
        return StreamingDataLoader(StreamingDataset(remote=str(root / "mds"), shuffle=True, **asked), **how)
    if system == "pillow":
        return DataLoader(Files(root / "files"), shuffle=True, **how)  # type: ignore[arg-type]
    transform = partial(by_pillow, rng=np.random.default_rng(0))
    if system == "litdata":
        import litdata

        dataset = litdata.StreamingDataset(str(root / "litdata"), shuffle=True, transform=transform)
        return litdata.StreamingDataLoader(dataset, **how)  # type: ignore[no-any-return]
    import streaming

    class Transformed(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            return transform(super().__getitem__(at))

    mds = Transformed(local=str(root / "mds"), shuffle=True, batch_size=BATCH_SIZE)
    return DataLoader(mds, **how)


def processor_seconds(process: int | str = "self") -> float:
    """Of a process and its children, so far."""
    try:
        ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{process}/task").glob("*/children")
        below = [int(child) for found in children for child in found.read_text().split()]
    except FileNotFoundError:  # it has ended
        return 0.0
    own: float = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(processor_seconds, below))


def measure(system: str, root: Path, workers: int, epochs: int) -> tuple[float, float]:
    """Pictures a second, and milliseconds of processor time a picture."""
    loader = loader_of(system, root, workers)
    shapes = {tuple(batch["image"].shape[1:]) for batch in loader}
    assert shapes == {(3, PIXELS, PIXELS)}
    used, began = processor_seconds(), time.perf_counter()
    count = sum(len(batch["label"]) for _ in range(epochs) for batch in loader)
    seconds = time.perf_counter() - began
    return count / seconds, (processor_seconds() - used) / count * 1e3


def run(python: str, *options: object) -> Any:
    """This script in a fresh process."""
    stubs = str(Path(__file__).parent / "reading" / "stubs")  # MosaicML imports torchvision, which nothing here needs
    done = subprocess.run(
        [python, "-m", "benchmarks.pictures", "--one", *map(str, options)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LITDATA_DISABLE_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": stubs},
    )
    if done.returncode:
        raise SystemExit(f"{options} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(options: argparse.Namespace) -> None:
    """Measure all, alternating, and print the table."""
    systems = ("ours", "pillow", *(OF_PEERS if options.peers else ()))
    print(f"| picture | workers | {' | '.join(systems)} | best other |\n|---|--:|{'--:|' * (len(systems) + 1)}")
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="pictures-") as scratch:
        root = Path(scratch)
        for name in options.sizes:
            run(sys.executable, "write", name, root, options.scale, 0)
            if options.peers:
                run(options.peers, "write_litdata", name, root, 0, 0)
            for workers in options.workers:
                found: dict[str, list[list[float]]] = {}
                for _ in range(options.rounds):
                    for system in systems:
                        python = options.peers if system in OF_PEERS else sys.executable
                        found.setdefault(system, []).append(run(python, system, name, root, workers, options.epochs))
                rates = {one: statistics.median(rate for rate, _ in told) for one, told in found.items()}
                costs = {one: statistics.median(cost for _, cost in told) for one, told in found.items()}
                cells = " | ".join(f"{rates[one]:,.0f} ({costs[one]:.2f} ms)" for one in systems)
                best = max(rate for one, rate in rates.items() if one != "ours")
                print(f"| {name} | {workers} | {cells} | {rates['ours'] / best:.2f} × |", flush=True)


def main() -> None:
    """Compare; or, as the process that is started for it, write or measure once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="Python of an environment with litData and MosaicML Streaming")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--scale", type=float, default=1, help="how many times the usual number of pictures")
    parser.add_argument("--epochs", type=int, default=2, help="read after the first, in one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, of which the median is shown")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="where the data is written")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.one:
        compare(options)
        return
    what, name, root, number, epochs = options.one
    if what == "write":
        write(Path(root), name, float(number))
    elif what == "write_litdata":
        write_litdata(Path(root), name)
    print(json.dumps(0 if what.startswith("write") else measure(what, Path(root) / name, int(number), int(epochs))))


if __name__ == "__main__":
    main()
