"""A configured run: its order and steps, its checkpoints, and what it needs before it starts."""
