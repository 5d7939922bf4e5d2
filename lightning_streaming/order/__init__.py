"""Which sample is read when: integers in, integers out; no files, no torch.

    settings       what the user says about order, and the names of its algorithms
    weights        how much of each stream an epoch draws; the shape of the data
    draw           one epoch's order: which samples it draws, shuffled
    shuffles       the shuffle algorithms: permutations, drawn
    blockwise      the same without drawing: a permutation worked out place by place
    sequence       how canonical nodes make one sequence
    batchings      which samples share a batch: one sequence of an epoch's order
    partition      how a sequence is divided among nodes, ranks and batches
    skips          which positions skipped batches have
    plan           all of it together for one epoch, with random access
    quality        how well an order mixes, and what it costs
    permutation, runs   arithmetic that several of these use

The order is that of MosaicML Streaming 0.13, bit for bit, but for ``blockwise``, which it does not have.
"""
