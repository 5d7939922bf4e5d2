"""How long ``lightning-streaming plan`` takes for large data, and what memory: of an index that is made up.

Run from the root of the repository:

    python -m benchmarks.plan_large                                # 10^6 shards, 10^8 samples, py1e
    python -m benchmarks.plan_large --samples 10b --algo blockwise

Nothing but the index is stored. The plan is made in a fresh process; prints what it prints, the seconds of an index
that is fetched and parsed for the first time and of one that is here, and the most memory that was resident.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.scale_node import Cluster, put_plain_index
from lightning_streaming.units import parse_bytes, parse_count


def main() -> int:
    """Plan twice, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=parse_count, default="100m", help="(default: %(default)s)")
    parser.add_argument("--shards", type=parse_count, default="1m", help="(default: %(default)s)")
    parser.add_argument("--shard-bytes", type=parse_bytes, default="16mb", help="(default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=16, help="of 8 ranks with 8 workers each (default: %(default)s)")
    parser.add_argument("--algo", default="py1e", help="shuffle_algo (default: %(default)s)")
    parser.add_argument("--limit", default="2tb", help="cache_limit (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="where files are put (default: that for temporary ones)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.directory, prefix="plan-") as scratch:
        root = Path(scratch)
        cluster = Cluster(
            samples=asked.samples, shards=asked.shards, shard_bytes=asked.shard_bytes, nodes=asked.nodes, ranks=8,
            workers=8, batch_size=32,
        )  # fmt: skip
        put_plain_index(root / "data", cluster)
        stream = {"remote": str(root / "data"), "local": str(root / "cache")}
        train = {"streams": {"web": stream}, "shuffle_algo": asked.algo, "cache_limit": asked.limit}
        data = {"init_args": {"batch_size": 32, "num_workers": 8, "train": train}}
        trainer = {"devices": 8, "num_nodes": asked.nodes, "max_epochs": 1}
        config = root / "run.yaml"
        config.write_text(json.dumps({"model": {"class_path": "not.imported"}, "data": data, "trainer": trainer}))
        environment = {**os.environ, "LIGHTNING_STREAMING_RUNTIME": scratch}
        command = [sys.executable, "-m", "lightning_streaming", "plan", "--config", str(config)]
        for place in range(2):
            began, before = time.perf_counter(), _processor_seconds()
            done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
            took = f"{time.perf_counter() - began:.1f} s, {_processor_seconds() - before:.1f} processor seconds"
            print("" if place else done.stdout + done.stderr, took, sep="\n", flush=True)
    print(f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:,.0f} MiB resident at most")
    return 0


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
