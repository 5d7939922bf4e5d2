"""Streams, order and cache brought together: samples, batches and the position in them."""
