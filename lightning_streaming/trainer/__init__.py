"""The Lightning front door: the only room that imports lightning."""
