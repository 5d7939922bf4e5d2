"""For which nodes, ranks and batch size an epoch's batches are made, and how they are dealt to others.

A run may go on in the middle of an epoch with other machines. Batching methods that compose batches then keep those of
the machines that the epoch began with: the sequence stays, and is dealt to the new ranks in runs of their global batch.
"""

from __future__ import annotations

from lightning_streaming.errors import ConfigError
from lightning_streaming.order.layout import IN_TURN, BatchGeometry, InBlocks, Layout, Regrouped
from lightning_streaming.order.sequence import fits
from lightning_streaming.order.settings import OrderSettings

_BLOCK_METHODS = frozenset({"device_per_stream", "stratified"})
"""Batching methods that compose each rank's batch, one after another."""


def epoch_geometry(settings: OrderSettings, current: BatchGeometry, initial_num_nodes: int | None) -> BatchGeometry:
    """The geometry for an epoch that begins now.

    It is that of the machines at hand, where the canonical nodes fit them. Where they do not, ``relaxed`` lets a run
    that began on other nodes go on with the sequence that these would read.

    Args:
        settings: Settled.
        current: The machines at hand, replication divided out.
        initial_num_nodes: Nodes that the run began with; None for a run that begins now.

    Raises:
        ConfigError: The canonical nodes do not fit the nodes, and the run has no others to go on with.
    """
    assert settings.num_canonical_nodes, "settle the settings first"
    canonical, nodes = settings.num_canonical_nodes, current.num_nodes
    if settings.batching_method == "stratified":
        return current  # reads all canonical nodes in turn, on any number of nodes
    even = canonical % nodes == 0 if settings.batching_method == "device_per_stream" else fits(canonical, nodes)
    if even:
        return current
    if settings.partition_algo == "orig" or initial_num_nodes is None:
        kinds = "multiple" if settings.batching_method == "device_per_stream" else "multiple or a divisor"
        raise ConfigError(
            f"num_canonical_nodes={canonical} must be a {kinds} of the {nodes} nodes; set it to a multiple of {nodes}"
        )
    initial_ranks = initial_num_nodes * current.ranks_per_node
    if settings.batching_method == "random" or (
        settings.batching_method == "per_stream" and current.global_batch_size % initial_ranks == 0
    ):
        return BatchGeometry(
            num_nodes=initial_num_nodes,
            ranks_per_node=current.ranks_per_node,
            batch_size=max(current.global_batch_size // initial_ranks, 1),
        )
    # One node fits whatever the canonical nodes are.
    return BatchGeometry(num_nodes=1, ranks_per_node=current.num_ranks, batch_size=current.batch_size)


def layout(settings: OrderSettings, current: BatchGeometry, epoch: BatchGeometry) -> Layout:
    """How global batches are divided among the machines at hand.

    Args:
        settings: Settled.
        current: The machines at hand, replication divided out.
        epoch: What the epoch's batches are made for.
    """
    assert settings.num_canonical_nodes, "settle the settings first"
    if settings.batching_method in _BLOCK_METHODS:
        return InBlocks()
    if fits(settings.num_canonical_nodes, current.num_nodes):
        return IN_TURN
    if current.global_batch_size % (epoch.num_nodes * current.ranks_per_node) == 0:
        return Regrouped(epoch.num_nodes)
    return IN_TURN
