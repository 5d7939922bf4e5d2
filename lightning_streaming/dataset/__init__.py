"""Streams and their samples: fetched, opened, decoded and transformed."""
