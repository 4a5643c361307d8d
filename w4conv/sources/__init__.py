"""Checkpoints: `open_source(path)` recognises what a path holds."""
