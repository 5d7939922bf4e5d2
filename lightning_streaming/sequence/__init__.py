"""The order of samples: integers in, integers out; no files, no torch.

An epoch's order is a chain of small steps. Each is built on the one before and has the same methods (``base``): its
length, the sample ids of any entries, and a digest of all it depends on.

    weights        DatasetShape   all samples, shard by shard, and the number of each stream that an epoch draws
    draw           Shuffled       the samples that one epoch draws, shuffled; drawn when ids are first requested
    batching       Batched        the order in which these are read, and so which share a batch; saved states count it
    skips          Skipped        without the positions that skipped batches have
    partition      Partition      divided among nodes, ranks and batches; how canonical nodes are read in turn

    settings       the options of the order, and the names of its algorithms
    shuffles       the shuffle algorithms: permutations, drawn
    blockwise      the same without drawing: a permutation that is computed place by place
    phases         MixtureSchedule: how many samples each step of each phase takes of each stream
    tokens         TokenPasses    the tokens along a stream's passes, for weights that count them; even shares of a step
    stream_slices  the samples that these are: the next ones of the stream's passes
    phased         Phased         the steps one after another, each shuffled and batched separately, as one Batched
    quality        the cost of an order for a node
    packing        how documents become packs:
      settings     the settings, and a name of all that packs depend on
      fill         the pack of its window that each document goes into
      plan         PackPlan       the documents of each pack of an epoch; computed once, kept in plain arrays
      packs        PackedEpoch    the packs of an epoch: which tokens of which documents each holds
    steps          SequenceStep   steps of the user, between ``Shuffled`` and ``Batched``
    permutation, runs   arithmetic that several of these use

To add a step, derive a class from ``SequenceStep``; ``sequence=`` of a dataset takes it, and saved positions hold its
facts. What selects samples, or weighs them again in each epoch, comes before ``Shuffled``: it returns the sizes to draw
from, and the sample id behind each number, as ``DatasetShape`` does. What follows ``Batched`` maps its entries to
positions with ``positions`` and ``entries_before``, as ``Skipped`` does, so a saved position means the same with and
without it.

Packs are planned from the ids and lengths of a whole epoch, and then take the place of the batching step.

The order is that of MosaicML Streaming 0.13, bit for bit, except for ``blockwise``, phases and packs, which it does not
have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_streaming.exports import lazy_exports

if TYPE_CHECKING:
    from lightning_streaming.sequence.base import SampleSequence as SampleSequence
    from lightning_streaming.sequence.steps import PartContext as PartContext
    from lightning_streaming.sequence.steps import SequenceStep as SequenceStep
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
