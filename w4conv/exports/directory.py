"""An output directory that appears whole under its name or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from w4conv import arguments
from w4conv.errors import OutputError, UsageError
from w4conv.files.streams import is_stdout
from w4conv.files.target import lock_output, output_errors, sync_directory

LEFTOVER: Final = "the leftover of an interrupted export was removed"
# What a directory may hold to count as a model, so that --overwrite never removes anything else.
_MODEL_SUFFIXES: Final = (".safetensors", ".json", ".jinja", ".model", ".txt", ".md", ".onnx", ".onnx.data")


def check_directory(path: Path, nbytes: int, *, overwrite: bool) -> None:
    """Raise OutputError when `path` cannot become a directory of `nbytes`."""
    if is_stdout(path):
        raise UsageError("this format is a directory, which standard output cannot take. Name a directory")
    with output_errors(path):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise OutputError(f"{path} exists already and is not a directory. Choose another name")
        if path.is_dir() and (held := sorted(p.name for p in path.iterdir())):
            if not arguments.flag(overwrite, "overwrite"):
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


@dataclass(frozen=True, slots=True)
class OpenDirectory:
    """A directory to write into. removed: what an interrupted export had left there was deleted."""

    path: Path
    removed: bool


@contextmanager
def open_directory(path: Path, nbytes: int, *, overwrite: bool = False) -> Iterator[OpenDirectory]:
    """An empty directory to write into, which becomes `path` when the block ends without an exception.

    It lies beside `path` as `<name>.partial`, locked by the process that writes it; whatever is raised,
    KeyboardInterrupt too, removes it. What is replaced stays, at the end as `<name>.old`, until the new directory is in
    its place. What a killed process left of either is removed, or put back. Raises OutputError.
    """
    check_directory(path, nbytes, overwrite=overwrite)
    final = path.resolve()
    partial, aside = (final.with_name(f"{final.name[:200]}.{ending}") for ending in ("partial", "old"))
    with output_errors(path):
        lock, removed = _claim(path, partial)
    try:
        with output_errors(path):
            recovered = _recover(final, aside)
        if recovered:
            check_directory(path, nbytes, overwrite=overwrite)
        removed = removed or recovered
        yield OpenDirectory(partial, removed)
        with output_errors(path):
            sync_directory(partial)
        check_directory(path, 0, overwrite=overwrite)  # it may have appeared meanwhile
        with output_errors(path):
            _move(partial, final, aside=aside)
            sync_directory(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _claim(path: Path, partial: Path) -> tuple[int, bool]:
    """A descriptor of the directory `partial`, made and locked, and whether a leftover was removed for it."""
    removed = False
    while True:
        try:
            partial.mkdir()
            ours = True
        except FileExistsError:
            ours = False
        try:
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # gone meanwhile
            continue
        except OSError as error:
            raise OutputError(
                f"{partial} is in the way, and w4conv has not left it there. Move it elsewhere"
            ) from error
        try:
            if lock_output(lock, path, partial, ours=ours):
                if ours:
                    return lock, removed
                _remove_leftover(partial)
                removed = True
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _remove_leftover(directory: Path) -> None:
    """Raises OutputError when a directory of our name holds what w4conv does not write."""
    for file in directory.iterdir():
        if file.is_symlink() or not file.is_file() or not file.name.removesuffix(".partial").endswith(_MODEL_SUFFIXES):
            raise OutputError(f"{directory} is in the way: it holds {file.name}. Move it elsewhere")
    shutil.rmtree(directory)


def _recover(final: Path, aside: Path) -> bool:
    """Undo a replacement that was cut short: put the old directory back, or if it was replaced, finish removing it."""
    if not aside.is_dir() or aside.is_symlink():
        return False
    if final.exists():
        _remove_leftover(aside)
    else:
        aside.rename(final)
    return True


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
