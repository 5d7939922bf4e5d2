"""Streams, order and cache brought together: samples, batches and the place in them."""
