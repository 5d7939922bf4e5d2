"""What the tool ``trace`` is made of.

steps.py     epochs, batches and steps: arithmetic on counts
run.py       the run: its loader, its topology, where it begins
reads.py     what a step reads, and when a sample is read
fields.py    what samples hold
show.py      tables and JSON
"""
