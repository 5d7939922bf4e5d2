"""How well each order mixes and what it costs a node, for one described dataset; nothing is stored or downloaded.

Run: python -m benchmarks.order_quality
Prints a Markdown table and the comparison of blockwise with py1e, writes both as JSON, and draws mixing against cost.
What each number means is said in benchmarks/order_mixing.py and lightning_streaming/sequence/quality.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.order_mixing import Mixing, largest_burst, lru_downloads, mixing, needed_within, uniform_mixing
from lightning_streaming.sequence.batching import Batched, batched
from lightning_streaming.sequence.draw import Shuffled
from lightning_streaming.sequence.partition import BatchGeometry, Partition
from lightning_streaming.sequence.quality import open_at_once, shard_visits
from lightning_streaming.sequence.settings import SHUFFLE_ALGOS, OrderSettings, ResolvedOrder, ShuffleAlgo
from lightning_streaming.sequence.weights import DatasetShape, StreamWeight, resolve_weights
from lightning_streaming.units import parse_bytes, parse_count

GIB = 1024**3
IN_BLOCKS = ("py1b", "py1br", "py1e", "blockwise")
"""Shuffles that a block size changes."""
PROMISE = 0.98
"""blockwise must mix at least this share of what py1e does at the same block size."""
PICTURE = Path(__file__).parent.parent / "docs" / "img" / "order_quality.png"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The data and the machines, the same for all orders."""

    samples: int
    shard_samples: int
    shard_bytes: int
    nodes: int
    ranks: int
    batch_size: int
    cache_limit: int
    prefetch: int
    """Batches that count as the start, and as one burst."""

    def shard_sizes(self) -> NDArray[np.int64]:
        """Samples in each shard; the last one has what is left."""
        whole, rest = divmod(self.samples, self.shard_samples)
        return np.asarray([self.shard_samples] * whole + [rest] * (rest > 0), np.int64)

    def bytes_of_shards(self) -> NDArray[np.int64]:
        """Bytes of each shard; all samples are of one size."""
        return self.shard_sizes() * self.shard_bytes // self.shard_samples

    def geometry(self) -> BatchGeometry:
        """What batches are made for."""
        return BatchGeometry(num_nodes=self.nodes, ranks_per_node=self.ranks, batch_size=self.batch_size)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One order, measured. Costs are those of the node that has it worst."""

    order: str
    block_size: int | None
    """None where the order has no blocks."""
    canonical_nodes: int
    mixing: Mixing
    """Relative to a uniform permutation."""
    most_open: int
    """Shards open at once."""
    mean_open: float
    """Shards open, averaged over batches."""
    most_open_bytes: int
    first_batch_bytes: int
    start_bytes: int
    """Used within the first batches."""
    downloads: float
    """Under the cache limit, relative to the shards that the node uses."""
    burst: float
    seconds: float
    """What measuring took."""


# --- the only part that knows how an epoch is planned ---


def plan(setting: Setting, settings: ResolvedOrder, epoch: int) -> Batched:
    """Plan an epoch that reads every sample once."""
    weights = resolve_weights([StreamWeight()], sizes=[setting.samples], epoch_size=None, seed=settings.shuffle_seed)
    shape = DatasetShape(shard_sizes=(setting.shard_sizes(),), weights=weights)
    return batched(Shuffled(settings, shape, epoch), setting.geometry())


def global_batches(setting: Setting, epoch: Batched) -> NDArray[np.int64]:
    """Sample ids in the order of the sequence, of shape (full batches, global batch size)."""
    size = setting.geometry().global_batch_size
    return epoch.ids_between(0, len(epoch) // size * size).reshape(-1, size)


def node_batches(setting: Setting, epoch: Batched, node: int) -> NDArray[np.int64]:
    """Sample ids that the ranks of a node read together, of shape (batches, samples); -1 for none."""
    partition = Partition(sequence=epoch, geometry=setting.geometry())
    batches = np.arange(partition.num_batches())
    positions = np.hstack([partition.batches(batches, node, rank) for rank in range(setting.ranks)])
    return np.where(positions < 0, -1, epoch.ids(np.maximum(positions, 0)))


def order_settings(
    setting: Setting, algo: ShuffleAlgo | None, block_size: int | None, canonical: int | None
) -> ResolvedOrder:
    """The settings of one order, defaults filled in; ``algo=None`` does not shuffle."""
    written = OrderSettings(
        shuffle=algo is not None,
        shuffle_algo=algo or "py1e",
        shuffle_block_size=block_size,
        num_canonical_nodes=canonical,
    )
    return written.resolved(setting.nodes)


# --- measuring ---


def measure(setting: Setting, settings: ResolvedOrder, uniform: Mixing) -> Row:
    """Draw two epochs of an order and measure the second."""
    began = time.perf_counter()
    sizes, shard_bytes = setting.shard_sizes(), setting.bytes_of_shards()
    before, epoch = plan(setting, settings, epoch=0), plan(setting, settings, epoch=1)
    mixed = mixing(global_batches(setting, epoch), global_batches(setting, before), sizes).relative_to(uniform)
    nodes = [shard_visits(node_batches(setting, epoch, node), sizes) for node in range(setting.nodes)]
    shards_open = [open_at_once(visits, np.ones_like(sizes)) for visits in nodes]
    return Row(
        order=settings.shuffle_algo if settings.shuffle else "none",
        block_size=settings.shuffle_block_size if settings.shuffle and settings.shuffle_algo in IN_BLOCKS else None,
        canonical_nodes=settings.num_canonical_nodes,
        mixing=mixed,
        most_open=max(int(each.max()) for each in shards_open),
        mean_open=max(float(each.mean()) for each in shards_open),
        most_open_bytes=max(int(open_at_once(visits, shard_bytes).max()) for visits in nodes),
        first_batch_bytes=max(needed_within(visits, shard_bytes, 1) for visits in nodes),
        start_bytes=max(needed_within(visits, shard_bytes, setting.prefetch) for visits in nodes),
        downloads=max(lru_downloads(visits, shard_bytes, setting.cache_limit) / len(visits.used()) for visits in nodes),
        burst=max(largest_burst(visits, setting.prefetch) for visits in nodes),
        seconds=time.perf_counter() - began,
    )


def all_orders(setting: Setting, block_sizes: list[int | None], splits: list[int]) -> list[ResolvedOrder]:
    """Every order once; those with blocks at every size with a canonical node per node, then with more of these."""
    orders = [order_settings(setting, algo, None, None) for algo in (None, *SHUFFLE_ALGOS) if algo not in IN_BLOCKS]
    for algo in [algo for algo in SHUFFLE_ALGOS if algo in IN_BLOCKS]:
        whole = [order_settings(setting, algo, block_size, setting.nodes) for block_size in block_sizes]
        orders += whole
        for split in splits:
            orders.append(order_settings(setting, algo, whole[0].shuffle_block_size // split, split * setting.nodes))
    return orders


def compare(rows: list[Row], one: str, other: str) -> list[dict[str, Any]]:
    """How well one order mixes relative to another of the same block size and canonical nodes."""
    others = {(row.block_size, row.canonical_nodes): row.mixing for row in rows if row.order == other}
    return [
        {"block_size": row.block_size, "canonical_nodes": row.canonical_nodes}
        | asdict(row.mixing.relative_to(others[row.block_size, row.canonical_nodes]))
        for row in rows
        if row.order == one
    ]


# --- showing ---


def markdown(setting: Setting, rows: list[Row]) -> str:
    """The table of all orders."""
    heads = ["order", "block", "C", "shards", "distances", "epochs", "open, most", "open, mean", "open, GiB"]
    heads += ["1 batch, GiB", f"{setting.prefetch} batches, GiB"]
    heads += [f"downloads at {setting.cache_limit / GIB:.0f} GiB", "burst"]
    lines = [heads, ["---"] + ["--:"] * (len(heads) - 1)]
    for row in rows:
        scores = [row.mixing.shards, row.mixing.distances, row.mixing.epochs]
        sizes = [row.most_open_bytes, row.first_batch_bytes, row.start_bytes]
        lines.append(
            [row.order, f"{row.block_size:,}" if row.block_size else "", str(row.canonical_nodes)]
            + [f"{score:.3f}" for score in scores]
            + [f"{row.most_open:,}", f"{row.mean_open:,.0f}"]
            + [f"{size / GIB:.1f}" for size in sizes]
            + [f"{row.downloads:.2f}", f"{row.burst:.1f}"]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def comparison(compared: list[dict[str, Any]]) -> str:
    """The table of blockwise against py1e, and whether the promise holds."""
    lines = ["| block | C | shards | distances | epochs |", "|--:|--:|--:|--:|--:|"]
    for row in compared:
        scores = " | ".join(f"{row[name]:.4f}" for name in ("shards", "distances", "epochs"))
        lines.append(f"| {row['block_size']:,} | {row['canonical_nodes']} | {scores} |")
    worst = min(row[name] for row in compared for name in ("shards", "distances", "epochs"))
    verdict = "holds" if worst >= PROMISE else "DOES NOT HOLD"
    return "\n".join([*lines, "", f"Worst {worst:.4f}; the promise of at least {PROMISE} {verdict}."])


LOOKS = {
    "none": ("X", 9, "#000000"),
    "naive": ("*", 12, "#000000"),
    "py1s": ("P", 11, "#999999"),
    "py2s": ("p", 7, "#555555"),
    "py1b": ("v", 11, "#E69F00"),
    "py1br": ("^", 9, "#009E73"),
    "py1e": ("o", 9, "#0072B2"),
    "blockwise": ("s", 6, "#D55E00"),
}
"""Marker, its size, and colour: shapes differ too, and the colours stay apart for colour-blind readers (Okabe, Ito)."""


def draw(setting: Setting, rows: list[Row], out: Path) -> None:
    """One panel for each cost, mixing upwards: the best place is the upper left."""
    panels = (
        ("most shards open at a time on a node (GiB)", lambda row: row.most_open_bytes / GIB),
        (f"needed for the first {setting.prefetch} batches (GiB)", lambda row: row.start_bytes / GIB),
        (f"largest burst of new shards in {setting.prefetch} batches (1: even)", lambda row: row.burst),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 4.8), sharey=True, layout="constrained")
    for axis, (title, cost) in zip(axes, panels, strict=True):
        for order in LOOKS:
            _draw_order(axis, order, [row for row in rows if row.order == order], cost)
        axis.set(xlabel=title, xscale="log", ylim=(0, 1.05))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    for row in rows:
        if row.order == "py1e" and not is_split(row, rows):
            name = f"blocks of {row.block_size:,}"
            spot = (row.most_open_bytes / GIB, row.mixing.shards)
            axes[0].annotate(name, spot, xytext=(-10, 6), textcoords="offset points", ha="right", fontsize=8)
    axes[0].set_ylabel("shards mixed in a batch (1: uniform permutation)")
    figure.suptitle(
        "Better is up and to the left. Hollow: largest blocks, divided among more canonical nodes.", fontsize=10
    )
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(LOOKS), frameon=False)
    figure.savefig(out, dpi=110)


def _draw_order(axis: Any, order: str, rows: list[Row], cost: Callable[[Row], float]) -> None:
    marker, size, colour = LOOKS[order]
    style = {"marker": marker, "markersize": size, "color": colour, "markeredgewidth": 1.5}
    whole = [row for row in rows if not is_split(row, rows)]
    split = [row for row in rows if is_split(row, rows)]
    axis.plot([cost(row) for row in whole], [row.mixing.shards for row in whole], label=order, **style)
    hollow = {"linestyle": "none", "markerfacecolor": "none"}
    axis.plot([cost(row) for row in split], [row.mixing.shards for row in split], **style, **hollow)


def is_split(row: Row, rows: list[Row]) -> bool:
    """Whether a row has more canonical nodes than others of its order."""
    return row.canonical_nodes > min(other.canonical_nodes for other in rows if other.order == row.order)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    data = parser.add_argument_group("the data")
    data.add_argument("--samples", type=parse_count, default="10m", help="in all shards (default: %(default)s)")
    data.add_argument("--shard-samples", type=parse_count, default="4096", help="in a shard (default: %(default)s)")
    data.add_argument("--shard-bytes", type=parse_bytes, default="64mb", help="of a shard (default: %(default)s)")
    machines = parser.add_argument_group("the machines")
    machines.add_argument("--nodes", type=int, default=2, help="(default: %(default)s)")
    machines.add_argument("--ranks", type=int, default=8, help="on each node (default: %(default)s)")
    machines.add_argument("--batch-size", type=int, default=32, help="samples of a rank (default: %(default)s)")
    machines.add_argument(
        "--cache-limit", type=parse_bytes, default="32gb", help="of a node; the oldest go (default: %(default)s)"
    )
    machines.add_argument(
        "--prefetch", type=int, default=64, help="batches that are the start, and one burst (default: %(default)s)"
    )
    orders = parser.add_argument_group("the orders")
    orders.add_argument(
        "--block-sizes", type=_block_size, nargs="+", default=[None, 262_144, 65_536], metavar="SAMPLES",
        help="for the orders that have blocks; 'default' for the one that a run takes (default: default 262144 65536)",
    )  # fmt: skip
    orders.add_argument(
        "--splits", type=int, nargs="*", default=[16], metavar="PARTS",
        help="also cut the first block size into this many canonical nodes on each node (default: 16)",
    )  # fmt: skip
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="to measure with (default: all cores)")
    parser.add_argument("--json", type=Path, default=Path("build/order_quality.json"), help="(default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="(default: docs/img/order_quality.png)")
    return parser.parse_args()


def _block_size(text: str) -> int | None:
    return None if text == "default" else parse_count(text)


def main() -> int:
    """Measure, print, write and draw; fails where blockwise does not keep its promise."""
    arguments = vars(parse_arguments())
    setting = Setting(**{name: arguments[name] for name in Setting.__dataclass_fields__})
    orders = all_orders(setting, arguments["block_sizes"], arguments["splits"])
    in_order = global_batches(setting, plan(setting, order_settings(setting, None, None, None), epoch=0))
    uniform = uniform_mixing(in_order, setting.shard_sizes())
    with ProcessPoolExecutor(arguments["processes"]) as pool:
        futures = [pool.submit(measure, setting, settings, uniform) for settings in orders]
        rows = [future.result() for future in futures]
    compared = compare(rows, "blockwise", "py1e")

    print(markdown(setting, rows))
    print("\nMixing of blockwise as a share of py1e's at the same block size:\n")
    print(comparison(compared))
    arguments["json"].parent.mkdir(parents=True, exist_ok=True)
    found = {"setting": asdict(setting), "orders": [asdict(row) for row in rows], "blockwise_to_py1e": compared}
    arguments["json"].write_text(json.dumps(found, indent=1) + "\n")
    draw(setting, rows, arguments["picture"])
    return 0 if all(row[name] >= PROMISE for row in compared for name in ("shards", "distances", "epochs")) else 1


if __name__ == "__main__":
    sys.exit(main())
