"""How fast local data is read, beside the machine's limits and other libraries; ``python -m benchmarks.reading``."""
