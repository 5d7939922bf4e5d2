"""Planned runs: what they read (planned_reads), what nodes fetch for them (node, resources), and the report."""
