"""An output directory that appears whole under its name or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from w4conv.container import STDOUT
from w4conv.errors import OutputError, UsageError

# What a directory may hold to count as a model, so that --overwrite never removes anything else.
_MODEL_SUFFIXES: Final = (".safetensors", ".json", ".jinja", ".model", ".txt", ".md", ".onnx", ".onnx.data")


def check_directory(path: Path, nbytes: int, *, overwrite: bool) -> None:
    """Raise OutputError when `path` cannot become a directory of `nbytes`."""
    if path in (STDOUT, Path("/dev/stdout")):
        raise UsageError("this format is a directory, which standard output cannot take. Name a directory")
    with _output_errors(path):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise OutputError(f"{path} exists already and is not a directory. Choose another name")
        if path.is_dir() and (held := sorted(p.name for p in path.iterdir())):
            if not overwrite:
                raise OutputError(
                    f"{path} exists already and is not empty. Choose another name, or give --overwrite to replace it"
                )
            others = [name for name in held if not name.endswith(_MODEL_SUFFIXES) or (path / name).is_dir()]
            if others or "config.json" not in held:
                what = f"it holds {others[0]}" if others else "it has no config.json"
                raise OutputError(
                    f"{path} is not replaced: {what}, so it may be more than a model. Choose another name"
                )
        parent = path.resolve().parent
        if not parent.is_dir():
            raise OutputError(f"{path}: the directory {parent} does not exist. Create it first")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise OutputError(f"{path}: no permission to create files in {parent}")
        free = shutil.disk_usage(parent).free
        if free < nbytes:
            raise OutputError(
                f"{path}: {nbytes:,} bytes are needed, but only {free:,} are free in {parent}. "
                "Free some space or write elsewhere"
            )


@contextmanager
def open_directory(path: Path, nbytes: int, *, overwrite: bool = False) -> Iterator[Path]:
    """An empty directory to write into, which becomes `path` when the block ends without an exception.

    It lies beside `path` (`<name>.<random>.partial`); whatever is raised, KeyboardInterrupt too, removes it. What is
    replaced stays until the new directory is complete. Raises OutputError.
    """
    check_directory(path, nbytes, overwrite=overwrite)
    final = path.resolve()
    token = secrets.token_hex(4)
    partial = final.with_name(f"{final.name[:200]}.{token}.partial")
    try:
        with _output_errors(path):
            partial.mkdir()
        yield partial
        with _output_errors(path):
            _sync(partial)
        check_directory(path, 0, overwrite=overwrite)  # it may have appeared meanwhile
        with _output_errors(path):
            _move(partial, final, aside=final.with_name(f"{final.name[:200]}.{token}.old"))
            _sync(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _move(partial: Path, final: Path, *, aside: Path) -> None:
    """Rename `partial` to `final`; what is there goes aside first, comes back if that fails, and is removed last."""
    replaces = final.is_dir()
    if replaces:
        final.rename(aside)
    try:
        partial.rename(final)
    except BaseException:
        if replaces:
            with suppress(OSError):
                aside.rename(final)
        raise
    if replaces:
        shutil.rmtree(aside)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _output_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"cannot write {path}: {reason}. Check the path, its permissions and the space") from error
