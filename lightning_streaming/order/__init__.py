"""Which sample is read when: integers in, integers out; no files, no torch.

    settings, shape    what the user says, and what is known of the data
    weights            how much of each stream an epoch draws
    sampling           which samples those are, when streams are repeated or drawn in part
    shuffle            in which order each canonical node reads them: permutations, drawn
    blockwise          the same without drawing: a permutation worked out place by place
    draw               both for one epoch: its order
    run_ids, runs      writing out the ids of shards, and finding the shard of an id
    sequence           how canonical nodes make one sequence
    batching           which samples share a batch: one sequence of an epoch's order
    layout, deal       how a sequence is dealt to nodes, ranks and batches
    gaps               what is left of a sequence without some of its positions
    batch_ranges       which positions skipped batches have
    first_reads        which reads are repeats that make the ranks even
    geometry           for which machines batches are made, when these change
    plan               all of it together for one epoch, with random access
    quality            how well an order mixes, and what it costs

The order is that of MosaicML Streaming 0.13, bit for bit, but for ``blockwise``, which it does not have.
"""
