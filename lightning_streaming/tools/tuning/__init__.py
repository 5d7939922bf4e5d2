"""Settings recommended for a run: its data is measured (measure), and the numbers are judged (advice)."""
