"""Which sample is read when: integers in, integers out; no files, no torch.

    weights     how much of each stream an epoch draws
    sampling    which samples those are, when streams are repeated or drawn in part
    shuffle     in which order each canonical node reads them
    partition   how canonical nodes make one sequence, and how a sequence is dealt to nodes, ranks and batches
    plan        all of it together for one epoch, with random access

The order is that of MosaicML Streaming 0.13, bit for bit.
"""
