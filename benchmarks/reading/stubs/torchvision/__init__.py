"""Stands in for torchvision, which has no build for a CPU-only torch: the names that peers import, no more."""
