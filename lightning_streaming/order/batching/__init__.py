"""Batching methods by name, one file each.

A batching method says in which order an epoch's places are read, and so which samples share a batch. All but
``random`` compose batches for given nodes, ranks and batch size, a
:class:`~lightning_streaming.order.layout.BatchGeometry`.
"""

from __future__ import annotations

from lightning_streaming.order.batching.device_per_stream import DevicePerStream
from lightning_streaming.order.batching.per_stream import PerStream
from lightning_streaming.order.batching.random import random
from lightning_streaming.order.batching.sequence import Batching, EpochFacts, EpochSequence
from lightning_streaming.order.batching.stratified import Stratified

__all__ = ["BATCHINGS", "EpochFacts", "EpochSequence"]

BATCHINGS: dict[str, Batching] = {
    "device_per_stream": DevicePerStream,
    "per_stream": PerStream,
    "random": random,
    "stratified": Stratified,
}
