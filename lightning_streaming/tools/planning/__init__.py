"""A run before it runs: what it reads (planned_reads), what nodes fetch for it (fetches), and how that is told."""
