"""Puts `tests/` on the import path, so that every test can say `from helpers import make_llama_dir`."""
