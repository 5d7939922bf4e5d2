"""One node of a job of many, by the library's own planner: what its workers ask for, when, and what is fetched.

The index is real, and so are the run, its order and the partition; what is simulated of workers and their cache is what
``lightning-streaming plan`` simulates.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_streaming import StreamingDataset, World
from lightning_streaming.reading.dataset import run_state_of, state_at
from lightning_streaming.resume.run import Epoch
from lightning_streaming.resume.run_state import drawn_sequence
from lightning_streaming.resume.state import Cursor
from lightning_streaming.selection.catalog import Catalog
from lightning_streaming.sequence.partition import INTERLEAVED
from lightning_streaming.sequence.settings import OrderSettings
from lightning_streaming.tools.planning.node import NodeReads
from lightning_streaming.tools.stored.summary import ShardBytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The data and the machines."""

    samples: int
    shards: int
    shard_bytes: int
    nodes: int
    ranks: int
    """Of each node."""
    workers: int
    """Of each rank."""
    batch_size: int
    """Samples of a rank's batch."""

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.nodes * self.ranks * self.batch_size

    @property
    def share_bytes(self) -> int:
        """What a node reads in an epoch."""
        return self.shards * self.shard_bytes // self.nodes

    def of_fewer_nodes(self, nodes: int) -> Cluster:
        """So many nodes, each with as much to read."""
        nodes = min(nodes, self.nodes)
        samples, shards = (number * nodes // self.nodes for number in (self.samples, self.shards))
        return replace(self, nodes=nodes, samples=samples, shards=shards)


def put_plain_index(directory: Path, cluster: Cluster) -> Path:
    """Write an index of that many shards, without hashes; gives the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    each, more = divmod(cluster.samples, cluster.shards)
    text = (
        '{"column_encodings": ["bytes"], "column_names": ["x"], "column_sizes": [null], "compression": null, "format": '
        '"mds", "hashes": [], "raw_data": {"basename": "shard.%05d.mds", "bytes": %d, "hashes": {}}, "samples": %d, '
        '"size_limit": 67108864, "version": 2, "zip_data": null}'
    )
    with (directory / "index.json").open("w") as file:
        file.write('{"shards": [')
        for shard in range(cluster.shards):
            file.write((", " if shard else "") + text % (shard, cluster.shard_bytes, each + (shard < more)))
        file.write('], "version": 2}')
    return directory


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """An order as it is asked for; None for ``stored``."""

    name: str
    block_size: int | None = None
    canonical_each: int | None = None
    """Canonical nodes of each node."""

    def settled_for(self, nodes: int) -> Order:
        """With the defaults of a run on so many nodes, to be used on others."""
        algo: Any = "py1e" if self.name == "stored" else self.name
        settled = OrderSettings(shuffle=self.name != "stored", shuffle_algo=algo).resolved(nodes)
        return replace(
            self,
            block_size=self.block_size or settled.shuffle_block_size,
            canonical_each=self.canonical_each or settled.num_canonical_nodes // nodes,
        )

    def options(self, nodes: int) -> dict[str, Any]:
        """Arguments of a dataset whose run begins on so many nodes."""
        if self.name == "stored":
            return {"shuffle": False}
        return {
            "shuffle": True,
            "shuffle_algo": self.name,
            "shuffle_block_size": self.block_size,
            "num_canonical_nodes": None if self.canonical_each is None else self.canonical_each * nodes,
        }


def node_epoch(
    dataset: StreamingDataset, cluster: Cluster, node: int, epoch: int | None = None, in_turn: bool = False
) -> NodeReads:
    """An epoch of a run, or what is left of it, as one node reads it.

    Args:
        dataset: Whose run it is; where a state was loaded, the one that goes on from there.
        cluster: The machines that read now.
        node: Which of them.
        epoch: Which epoch; None for where the dataset stands.
        in_turn: Whether global batches are dealt in turn where canonical nodes do not fit, to compare.
    """
    world = World(num_nodes=cluster.nodes, ranks_per_node=cluster.ranks)
    run = run_state_of(dataset).on(world, cluster.batch_size, False)
    cursor = run.normalise(run_state_of(dataset).next_cursor() if epoch is None else Cursor(epoch, 0))
    found: Epoch = run.at(cursor).epoch(cursor)
    catalog = found.order.catalog
    assert isinstance(catalog, Catalog), "as the data has not grown"
    partition = replace(found.partition, layout=INTERLEAVED) if in_turn else found.partition
    return NodeReads(
        catalog=catalog,
        sequence=drawn_sequence(found),
        partition=partition,
        node=node,
        num_workers=cluster.workers,
        num_batches=partition.num_batches(),
    )


def bytes_of_shards(reads: NodeReads) -> ShardBytes:
    """Bytes of each shard's raw file."""
    return ShardBytes.plain(np.concatenate([index.shards.data_bytes() for index in reads.catalog.indexes]))


def state_bytes(dataset: StreamingDataset, samples: int) -> int:
    """Bytes of a saved state in the middle of the first epoch, as JSON."""
    return len(json.dumps(state_at(dataset, Cursor(0, samples))))
