"""Use cases, one a file, named as the command: paths and options in, dataclasses out, nothing printed."""
