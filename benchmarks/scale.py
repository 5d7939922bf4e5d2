"""What a job of very many nodes asks of its store, worked out with the library's own planner.

Run from the root of the repository:

    python -m benchmarks.scale                                               # 16 nodes, half a minute
    python -m benchmarks.scale --nodes 1000 --samples 10b --shards 1m        # hours; see --sampled-nodes
    python -m benchmarks.scale --nodes 256 --samples 2b --shards 200k --orders blockwise --limits 0.3

Nothing is stored but an index of the data and a few shards. Of some nodes the run, its order, the partition, what each
worker needs and how far it looks ahead are those of the library, and the cache follows the library's rules: workers and
cache are simulated as by ``lightning-streaming plan`` (tools/planning/node.py). What a shard and an
index cost is measured with a server on this machine (benchmarks/scale_costs.py). How a store's limit is met is
simulated with the library's own waits (benchmarks/scale_store.py). Orders that are drawn as a whole are drawn for
``--drawn-nodes``, each with the same share: to draw them for all would take 8 bytes for each sample.

Prints Markdown tables, and writes all numbers as JSON:

    start      what every node asks for before the first batch, and how long that takes
    epochs     what a node fetches in its first epoch and in the next, with a cache that has room for a part of it
    rates      requests a second of all nodes together: the mean, and the busiest second and minute
    changes    what is fetched by a run that goes on in the middle of an epoch, on as many nodes or on others
    limits     how many requests a store refuses at the start, and how many are given up

"share" is what a node reads in an epoch: the data divided by the nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale_costs import Costs, measure_costs
from benchmarks.scale_node import (
    Cluster,
    Order,
    bytes_of_shards,
    node_epoch,
    put_plain_index,
    state_bytes,
)
from benchmarks.scale_store import Store, storm
from lightning_streaming import StreamingDataset, World
from lightning_streaming.tools.planning.node import FirstRequests, NodeCache, NodeReads, first_requests, read_epoch
from lightning_streaming.units import parse_bytes, parse_count

ORDERS = ("blockwise", "py1e", "py1br", "py1s", "py2s", "naive", "stored")
DRAWN = ("py1e", "py1br", "py1s", "py2s", "naive")
"""Orders of which no part is known before the whole is drawn."""
GIVE_UP = 20
"""A cache that fetches each shard so often is too small, however often it is in the end."""
BUSY = (1, 60)
"""Seconds in which requests are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is asked about."""

    cluster: Cluster
    store: Store
    step_seconds: float
    drawn_nodes: int
    sampled_nodes: int
    scratch: str

    def cluster_of(self, order: str) -> Cluster:
        """The nodes that an order is worked out for."""
        return self.cluster.of_fewer_nodes(self.drawn_nodes) if order in DRAWN else self.cluster


def dataset_of(setting: Setting, order: Order, cluster: Cluster, began: int | None = None) -> StreamingDataset:
    """A dataset of which only the index is there, read by the first rank of a cluster.

    Args:
        setting: What is asked about.
        order: In which order.
        cluster: The machines that read.
        began: The nodes of the first start, if these are others.
    """
    directory = Path(setting.scratch) / f"index-{cluster.shards}"
    if not (directory / "index.json").exists():
        put_plain_index(directory, cluster)
    world = World(num_nodes=cluster.nodes, ranks_per_node=cluster.ranks)
    options = order.settled_for(setting.cluster.nodes).options(began or cluster.nodes)
    return StreamingDataset(remote=str(directory), batch_size=cluster.batch_size, world=world, **options)


def sampled(nodes: int, wanted: int) -> list[int]:
    """Some of the nodes, spread over all."""
    return sorted(set(np.linspace(0, nodes - 1, min(wanted, nodes)).astype(int).tolist()))


# --- one order ---


def start_and_rates(setting: Setting, name: str) -> dict[str, Any]:
    """What nodes ask for at first, and when they ask for the rest."""
    cluster = setting.cluster_of(name)
    dataset = dataset_of(setting, Order(name=name), cluster)
    assert dataset.size  # so that the index is read
    began, nodes = time.process_time(), sampled(cluster.nodes, setting.sampled_nodes)
    node_epoch(dataset, cluster, nodes[0]).first_shards()
    seconds, factor = time.process_time() - began, setting.cluster.nodes / cluster.nodes
    asked, first = list[FirstRequests](), list[int]()
    for node in nodes:
        epoch = node_epoch(dataset, cluster, node)
        asked.append(first_requests(epoch))
        first.append(len(set().union(*epoch.first_shards())))
    steps = np.concatenate([one.steps for one in asked])
    times = np.sort(steps[steps > epoch.num_batches // 20] * setting.step_seconds)
    return {
        "order": name,
        "nodes": cluster.nodes,
        "first": float(np.mean(first)),
        "at_first": float(np.mean([(one.steps == 0).sum() for one in asked])),
        "shards": float(np.mean([len(one.shards) for one in asked])),
        "order_seconds": seconds * (factor if name in DRAWN else 1),
        "order_bytes": setting.cluster.samples * 8 if name in DRAWN else 0,
        "mean": len(times) / (epoch.num_batches * 0.95 * setting.step_seconds) / len(nodes),
        "busiest": {str(window): busiest(times, window) / window / len(nodes) for window in BUSY},
    }


def busiest(times: NDArray[np.float64], seconds: float) -> int:
    """The most of some times, ascending, within so many seconds."""
    ends = np.searchsorted(times, times + seconds, side="left")
    return int((ends - np.arange(len(times))).max(initial=0))


def epochs(setting: Setting, name: str, shares: Sequence[float]) -> list[dict[str, Any]]:
    """What one node fetches in two epochs, for each size of its cache: parts of its share, in descending order."""
    cluster = setting.cluster_of(name)
    dataset = dataset_of(setting, Order(name=name), cluster)
    node, rows, hopeless = cluster.nodes // 2, list[dict[str, Any]](), False
    both = [node_epoch(dataset, cluster, node, epoch) for epoch in (0, 1)]
    sizes, needed = bytes_of_shards(both[0]), len(first_requests(both[0]).shards)
    for share in shares:
        room, fetched = int(share * cluster.share_bytes), list[float]()
        cache = NodeCache(sizes, room)
        for epoch in () if hopeless else both:
            before = cache.downloads
            part = _read(epoch, cache, before + GIVE_UP * needed)
            fetched.append((cache.downloads - before) / part / needed)
            if part < 1:
                hopeless = True
                break
        rows.append({"order": name, "share": share, "room": room, "fetched": fetched})
        rows[-1]["needed"] = needed * cluster.shard_bytes
    return rows


def _read(epoch: NodeReads, cache: NodeCache, most: int) -> float:
    """The part of an epoch that is read before there are so many downloads; mostly all."""
    return read_epoch(epoch, cache, lambda _: cache.downloads <= most) / epoch.num_batches


def changes(setting: Setting, name: str, others: Sequence[int]) -> list[dict[str, Any]]:
    """What is fetched when a run goes on in the middle of an epoch on some nodes."""
    cluster = setting.cluster
    first = dataset_of(setting, Order(name=name), cluster)
    half = cluster.samples // 2 // cluster.global_batch * cluster.global_batch
    state, had = first.state_dict(half), dict[int, NDArray[np.int64]]()
    for node in sampled(min([cluster.nodes, *others]), setting.sampled_nodes):
        whole = first_requests(node_epoch(first, cluster, node))
        had[node] = whole.shards[whole.steps <= half // cluster.global_batch]
    cases = [(cluster.nodes, False), *((nodes, in_turn) for nodes in others for in_turn in (False, True))]
    return [_gone_on(setting, name, state, had, nodes, in_turn=in_turn) for nodes, in_turn in cases]


def _gone_on(
    setting: Setting, name: str, state: Any, had: dict[int, NDArray[np.int64]], nodes: int, *, in_turn: bool
) -> dict[str, Any]:
    """What a run that goes on fetches; what each node asked for before is known."""
    cluster = setting.cluster
    now, rest, here, following = replace(cluster, nodes=nodes), list[int](), list[float](), list[int]()
    dataset = dataset_of(setting, Order(name=name), now, began=cluster.nodes)
    dataset.load_state_dict(state)
    for node, before in had.items():
        shards = first_requests(node_epoch(dataset, now, node, in_turn=in_turn)).shards
        rest.append(len(shards))
        here.append(float(np.isin(shards, before).mean()))
        following.append(len(first_requests(node_epoch(dataset, now, node, epoch=1, in_turn=in_turn)).shards))
    return {
        "order": name,
        "nodes": nodes,
        "in_turn": in_turn,
        "fetched": float(np.mean(rest)) * cluster.shard_bytes,
        "of_the_rest": float(np.mean(rest)) * nodes / (cluster.shards / 2),
        "here": float(np.mean(here)),
        "of_the_data": float(np.mean(following)) * nodes / cluster.shards,
    }


def state(setting: Setting) -> int:
    """Bytes of a saved state."""
    return state_bytes(dataset_of(setting, Order(name="blockwise"), setting.cluster), setting.cluster.samples // 2)


def storms(setting: Setting, each: int, size: float, retries: Sequence[int]) -> list[dict[str, Any]]:
    """What comes of the requests of all nodes at their start; of every tenth node, by a tenth of the store, if many."""
    nodes, tenth = setting.cluster.nodes, 10 if setting.cluster.nodes >= 100 else 1
    store = replace(setting.store, per_second=setting.store.per_second / tenth)
    rows = []
    for retry in retries:
        found = storm(store, nodes // tenth, each, size, retry + 1)
        rows.append({"retry": retry, **asdict(found)})
    return rows


# --- showing ---


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], words: int = 1) -> str:
    """A Markdown table, of which the first columns hold words."""
    lines = [heads, ["---" if place < words else "--:" for place in range(len(heads))], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def show_start(setting: Setting, costs: Costs, rows: Sequence[dict[str, Any]]) -> str:
    """What is asked for before the first batch."""
    cluster, store, lines = setting.cluster, setting.store, list[list[str]]()
    index_link = costs.index_bytes / store.link
    index = [
        "the index",
        f"{costs.index_bytes / 1e9:.2f} GB",
        f"{costs.index_requests}",
        f"{costs.index_requests * cluster.nodes:,}",
        f"{index_link:.1f} s",
        f"{costs.index_requests * cluster.nodes / store.per_second:.1f} s",
        f"{costs.index_seconds:.1f} s",
    ]
    lines.append(index)
    for row in rows:
        requests = row["at_first"] * costs.shard_requests
        lines.append(
            [
                f"shards, {row['order']}",
                f"{row['at_first'] * cluster.shard_bytes / 1e9:.2f} GB",
                f"{requests:,.0f}",
                f"{requests * cluster.nodes:,.0f}",
                f"{store.latency + row['at_first'] * cluster.shard_bytes / store.link:.1f} s",
                f"{requests * cluster.nodes / store.per_second:.1f} s",
                f"{row['order_seconds']:.1f} s"
                + (f", {row['order_bytes'] / 1e9:.1f} GB" if row["order_bytes"] else ""),
            ]
        )
    limit = f"at {store.per_second:,.0f} requests/s"
    return table(["", "bytes", "requests", "of all nodes", "by the link", limit, "processor s, file"], lines)


def show_epochs(rows: Sequence[dict[str, Any]]) -> str:
    """What caches of several sizes fetch."""

    def cell(row: dict[str, Any]) -> str:
        if not row["fetched"]:
            return "more"
        return ", ".join(f"{times:,.2f}" if times < GIVE_UP else f"{times:,.0f}" for times in row["fetched"])

    shares = sorted({row["share"] for row in rows}, reverse=True)
    orders = list(dict.fromkeys(row["order"] for row in rows))
    lines = []
    for order in orders:
        of_order = {row["share"]: row for row in rows if row["order"] == order}
        needed = f"{of_order[shares[0]]['needed'] / 1e9:,.1f} GB"
        lines.append([order, needed, *(cell(of_order[share]) for share in shares)])
    return table(["order", "needed", *(f"{share:.0%} of a share" for share in shares)], lines)


def show_rates(setting: Setting, costs: Costs, rows: Sequence[dict[str, Any]]) -> str:
    """Requests a second after the start."""
    factor = setting.cluster.nodes * costs.shard_requests
    lines = [
        [row["order"], f"{row['mean'] * factor:,.0f}", *(f"{rate * factor:,.0f}" for rate in row["busiest"].values())]
        for row in rows
    ]
    return table(["order", "mean", *(f"busiest {window} s" for window in BUSY)], lines)


def show_changes(rows: Sequence[dict[str, Any]]) -> str:
    """What a run that goes on fetches."""
    lines = [
        [
            row["order"],
            f"{row['nodes']:,}" + (", dealt in turn" if row["in_turn"] else ""),
            f"{row['fetched'] / 1e9:,.1f} GB",
            f"{row['of_the_rest']:,.2f}",
            f"{row['here']:.0%}",
            f"{row['of_the_data']:,.2f}",
        ]
        for row in rows
    ]
    heads = ["order", "goes on on", "needed by a node", "× what is left", "fetched before", "next epoch, × the data"]
    return table(heads, lines, words=2)


def show_storms(rows: Sequence[dict[str, Any]]) -> str:
    """What a store refuses."""
    lines = [
        [
            row["retry"],
            f"{row['refused'] / row['requests']:.1f}",
            f"{row['gave_up'] / row['requests']:.1%}",
            f"{row['seconds']:.0f} s",
        ]
        for row in rows
    ]
    return table(["download_retry", "refusals of a request", "given up", "last answer after"], lines)


def show(setting: Setting, costs: Costs, found: dict[str, Any], most: str) -> str:
    """All tables."""
    cluster = setting.cluster
    said = [
        f"{cluster.samples:,} samples in {cluster.shards:,} shards; a share is {cluster.share_bytes / 1e9:.1f} GB.",
        f"A shard takes {costs.shard_requests:g} requests, a GB {costs.shard_seconds_per_gb:.1f} processor seconds.",
        f"An index that is here takes {costs.later_requests} requests, and {costs.kept_bytes / 1e9:.2f} GB of a cache.",
        f"A saved state has {found['state']:,} bytes.",
    ]
    tables = {
        "Start": show_start(setting, costs, found["starts"]),
        "Epochs: fetched, × needed, in the first and the next": show_epochs(found["epochs"]),
        "Requests a second": show_rates(setting, costs, found["starts"]),
        "Other nodes from the middle of an epoch": show_changes(found["changes"]),
        f"The shards of a start, {most}": show_storms(found["storms"]),
    }
    return "\n".join(said) + "".join(f"\n\n### {title}\n\n{lines}" for title, lines in tables.items())


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    data = parser.add_argument_group("the data")
    data.add_argument("--samples", type=parse_count, default="8m", help="in all shards (default: %(default)s)")
    data.add_argument("--shards", type=parse_count, default="800", help="(default: %(default)s)")
    data.add_argument("--shard-bytes", type=parse_bytes, default="64mb", help="of a shard (default: %(default)s)")
    machines = parser.add_argument_group("the machines")
    machines.add_argument("--nodes", type=int, default=16, help="(default: %(default)s)")
    machines.add_argument("--ranks", type=int, default=8, help="on each node (default: %(default)s)")
    machines.add_argument("--workers", type=int, default=8, help="of each rank (default: %(default)s)")
    machines.add_argument("--batch-size", type=int, default=32, help="samples of a rank (default: %(default)s)")
    machines.add_argument("--step-seconds", type=float, default=0.5, help="of a step (default: %(default)s)")
    machines.add_argument("--link", type=float, default=25, help="of a node, in Gbit/s (default: %(default)s)")
    machines.add_argument("--latency", type=float, default=0.05, help="seconds before an answer (default: %(default)s)")
    machines.add_argument(
        "--requests", type=float, default=5500, help="a second that the store answers (default: %(default)s)"
    )
    asked = parser.add_argument_group("what is worked out")
    asked.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS, help="(default: all)")
    asked.add_argument(
        "--limits", type=float, nargs="+", default=[0.5, 0.2, 0.1, 0.05], metavar="PART",
        help="room for shards, as a part of a share (default: 0.5 0.2 0.1 0.05)",
    )  # fmt: skip
    asked.add_argument("--goes-on", type=int, nargs="*", metavar="NODES", help="(default: one node less)")
    asked.add_argument("--retries", type=int, nargs="+", default=[2, 5, 8], help="download_retry (default: 2 5 8)")
    asked.add_argument("--sampled-nodes", type=int, default=8, help="worked out of all nodes (default: %(default)s)")
    asked.add_argument("--drawn-nodes", type=int, default=8, help="see above (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="to work with (default: all cores)")
    parser.add_argument("--directory", type=Path, help="where files are put (default: that for temporary ones)")
    parser.add_argument("--json", type=Path, default=Path("build/scale.json"), help="(default: %(default)s)")
    return parser.parse_args()


def work_out(setting: Setting, arguments: argparse.Namespace) -> dict[str, Any]:
    """All numbers, by table."""
    shares = sorted(arguments.limits, reverse=True)
    others = [setting.cluster.nodes - 1] if arguments.goes_on is None else arguments.goes_on
    # Their indexes are written before several processes ask for them, and parsed by one.
    for name in arguments.orders:
        assert dataset_of(setting, Order(name=name), setting.cluster_of(name)).size
    with ProcessPoolExecutor(arguments.processes) as pool:
        rows = [pool.submit(start_and_rates, setting, name) for name in arguments.orders]
        gone_on = [pool.submit(changes, setting, name, others) for name in arguments.orders if name not in DRAWN]
        read = [pool.submit(epochs, setting, name, shares) for name in arguments.orders]
        size = pool.submit(state, setting)
        return {
            "starts": [one.result() for one in rows],
            "changes": [row for one in gone_on for row in one.result()],
            "epochs": [row for one in read for row in one.result()],
            "state": size.result(),
        }


def main() -> int:
    """Work out, print and write."""
    arguments = parse_arguments()
    fields = ("samples", "shards", "shard_bytes", "nodes", "ranks", "workers", "batch_size")
    cluster = Cluster(**{name: getattr(arguments, name) for name in fields})
    store = Store(per_second=arguments.requests, latency=arguments.latency, link=arguments.link * 1e9 / 8)
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="scale-") as scratch:
        for variable in ("LIGHTNING_STREAMING_CACHE", "LIGHTNING_STREAMING_RUNTIME"):
            os.environ[variable] = str(Path(scratch) / variable.lower())
            Path(os.environ[variable]).mkdir()
        setting = Setting(
            cluster=cluster, store=store, step_seconds=arguments.step_seconds, drawn_nodes=arguments.drawn_nodes,
            sampled_nodes=arguments.sampled_nodes, scratch=scratch,
        )  # fmt: skip
        found = work_out(setting, arguments)
        costs = measure_costs(Path(scratch), cluster.shards, cluster.shard_bytes)
    most = max(found["starts"], key=lambda row: row["order"] == "blockwise")
    each = round(most["at_first"] * costs.shard_requests)
    found["storms"] = storms(setting, each, cluster.shard_bytes / costs.shard_requests, arguments.retries)
    print(show(setting, costs, found, most["order"]))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    said = {"cluster": asdict(cluster), "costs": asdict(costs), **found}
    arguments.json.write_text(json.dumps(said, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
