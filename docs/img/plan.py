"""The picture of a plan's page: of a run over three streams of tokens, of which only indexes are made.

Run from the root of the repository, where Chromium is installed: python -m docs.img.plan
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chromium import browser

SHARDS = {"web": 10_000, "code": 2_000, "math": 150}
SHARD_SAMPLES, TOKENS = 4_000, 2_049
SCHEDULE = {
    "broad": {"end": "70%", "mix": {"web": 0.85, "code": 0.15}},
    "ramp": {"end": "90%", "mix": {"web": [0.85, 0.4], "code": [0.15, 0.3], "math": [0, 0.3]}},
    "anneal": {"mix": {"web": 0.2, "code": 0.4, "math": 0.4}},
}


def write_index(directory: Path, shards: int) -> None:
    """An index of so many shards, which are not there."""
    entry = {
        "column_encodings": ["ndarray:uint16:2049"], "column_names": ["tokens"], "column_sizes": [2 * TOKENS],
        "compression": None, "format": "mds", "hashes": [], "samples": SHARD_SAMPLES, "size_limit": 1 << 26,
        "version": 2, "zip_data": None,
    }  # fmt: skip
    size = SHARD_SAMPLES * (2 * TOKENS + 4)
    files = ({"basename": f"shard.{number:05}.mds", "bytes": size, "hashes": {}} for number in range(shards))
    directory.mkdir()
    (directory / "index.json").write_text(
        json.dumps({"version": 2, "shards": [{**entry, "raw_data": f} for f in files]})
    )


def main() -> None:
    """Plan the run, and take the picture."""
    with TemporaryDirectory() as name:
        root = Path(name)
        for stream, shards in SHARDS.items():
            write_index(root / stream, shards)
        streams = {one: {"remote": str(root / one), "local": str(root / "cache" / one)} for one in SHARDS}
        train = {"streams": streams, "schedule": SCHEDULE, "epoch_size": "40m", "cache_limit": "40gb"}
        train |= {"shuffle_block_size": 262_144}
        data = {"init_args": {"batch_size": 16, "num_workers": 4, "train": train}}
        trainer = {"max_epochs": 1, "devices": 8, "num_nodes": 4}
        run = {"model": {"class_path": "my_project.MyModel"}, "data": data, "trainer": trainer}
        (root / "run.yaml").write_text(json.dumps(run))
        command = [sys.executable, "-m", "lightning_streaming", "plan", "--config", "run.yaml"]
        more = ["--html", "plan.html", "--limit", "none", "--limit", "15gb"]
        subprocess.run([*command, *more], check=True, cwd=root)  # noqa: S603  our own program
        with browser() as one:
            one.size(1280, 1500)
            one.open((root / "plan.html").as_uri())
            one.picture(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
