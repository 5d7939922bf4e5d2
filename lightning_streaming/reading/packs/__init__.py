"""Packs of documents and groups under a token budget: batches, their types and values."""
