"""A checkpoint becomes a container: planned, then written a block of rows at a time."""
