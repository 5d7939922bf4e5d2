"""What a user configures: the groups of options, each a frozen dataclass that checks itself."""
