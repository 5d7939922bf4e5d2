"""Programs to start from; README.md lists which one is for which need."""
