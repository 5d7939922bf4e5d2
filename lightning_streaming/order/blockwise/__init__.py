"""An order of any size: nothing in it is as long as an epoch, and any place of it is worked out by itself.

    counts        how many samples each shard gives
    drawn         the units to shuffle: shards repeated whole, and parts of shards
    pieces        place of a canonical node's shards, one after another  ->  sample id
    blocks        place in the epoch's order  ->  place of a canonical node's shards, mixed within a block
    order         both together
    permutation   mixing without a list: keyed permutations of any size, an index at a time
    keys          what keys them
    generators    what is drawn from which random numbers

Memory and set-up grow with shards and canonical nodes; a sample id costs the same at any place of any epoch.
"""

from lightning_streaming.order.blockwise.order import BlockwiseOrder, blockwise_order, joined

__all__ = ["BlockwiseOrder", "blockwise_order", "joined"]
