"""What ``lightning-streaming state`` works with.

unpickling     reads what a file of torch.save says, without running code of it and without its tensors
files          a checkpoint, a sharded one, or a state alone: read, and written again with a backup
places         the places in the data that such a file holds, and how far its trainer has come
counters       Lightning's own counters, set to another place
moves          from one place to another: a given one, or so many samples or batches later
seen           samples of each stream before a place
report         all of it in tables
"""
