"""Datasets made of what people have: rows of other forms (sources), written (conversion); texts packed (tokens)."""
