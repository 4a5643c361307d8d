"""Outputs kept apart from inputs: nothing is written onto, inside or around what a command reads or was made from.

Files are told by device and inode, so that links, `..`, bind mounts and other spellings of a name are seen through.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from w4conv.arguments import path_of
from w4conv.errors import UsageError
from w4conv.files.streams import is_stdin, is_stdout

_SCRATCH: Final = (".partial", ".old")  # what an output is called while it is written
_WEIGHTS: Final = (".safetensors", ".gguf", ".bin", ".onnx.data")

Id = tuple[int, int]  # device and inode
PathWords = str | os.PathLike[str]


def refuse_overlap(outputs: Iterable[PathWords], **inputs: PathWords | Sequence[PathWords] | None) -> None:
    """Raise UsageError when an output is an input, lies in it or holds it, or when two outputs are one.

    outputs: files or directories to be written; "-" is standard output. inputs: files or directories that are read, by
    what they are (source, text); of a directory, the files in it too. "-" is standard input. None, and what is not
    there, counts for nothing; so do pipes and devices that hold nothing.
    """
    files: dict[Id, str] = {}  # what a file is
    folders: dict[Id, str] = {}
    read: list[Path] = []
    for word, given in inputs.items():
        several = given if isinstance(given, list | tuple) else [] if given is None else [given]
        for path in [path_of(one, word) for one in several]:
            read.append(path)
            status = _status(0 if is_stdin(path) else path)
            if status is not None and stat.S_ISDIR(status.st_mode):
                folders[_id(status)] = f"the {word}"
                for name, entry in _files(path):
                    files.setdefault(entry, f"{name} of the {word}")
            elif status is not None:
                files[_id(status)] = f"the {word} itself"
    seen: dict[Id | Path, Path] = {}
    for out in [path_of(out, "out") for out in outputs]:
        if is_stdout(out):
            status = _status(1)
            if status is not None and (what := files.get(_id(status))):
                raise UsageError(f"standard output is {what}. Send it elsewhere")
        else:
            _refuse(out, files, folders, read)
        status = _status(1 if is_stdout(out) else out)
        key = Path(os.path.realpath(out)) if status is None else _id(status)
        if key in seen and not _is_device(out):
            raise UsageError(f"{out} and {seen[key]} are one output. Name two")
        seen[key] = out


def refuse_origin(out: PathWords, provenance: Mapping[str, Any], digests: Sequence[str]) -> None:
    """Raise UsageError when `out` is what a container was made from, lies in that directory or holds its weights.

    provenance, digests: of the container, whose record names each file with its size, and its BLAKE3 in hexadecimal.
    """
    source = provenance.get("source")
    listed = source.get("files") if isinstance(source, Mapping) else None
    out = Path(out)
    if is_stdout(out) or not isinstance(listed, list) or len(listed) != len(digests):
        return
    found = [
        (str(file.get("name")), int(file.get("nbytes", -1)), digest)
        for file, digest in zip(listed, digests, strict=True)
        if isinstance(file, Mapping)
    ]
    weights = [file for file in found if file[0].endswith(_WEIGHTS)]
    path = Path(os.path.realpath(out))
    for name, nbytes, digest in found:
        if _holds(path, nbytes, digest):
            raise UsageError(f"{out} is {name}, of which the container was made. Name another output")
    for entry in path.iterdir() if known(Path.is_dir, path) else ():
        for name, nbytes, digest in weights:
            if _holds(entry, nbytes, digest):
                raise UsageError(f"{out} holds {name}, of which the container was made. Name another output")
    if not weights or weights[0][0].endswith(".gguf"):
        return  # a file alone, whose folder is not part of it
    name, nbytes, digest = min(weights, key=lambda file: file[1])
    for folder in path.parents:
        if all(_has_size(folder / file, size) for file, size, _ in weights) and _holds(folder / name, nbytes, digest):
            raise UsageError(f"{out} lies inside {folder}, of which the container was made. Write outside of it")


def known(what: Callable[[Path], bool], path: PathWords) -> bool:
    """what: such as Path.is_dir. False where the system cannot say, of a name that is too long for it."""
    try:
        return what(Path(path))
    except OSError:
        return False


def _refuse(out: Path, files: Mapping[Id, str], folders: Mapping[Id, str], read: Iterable[Path]) -> None:
    path = Path(os.path.realpath(out))
    status = _status(path)
    if status is None and known(Path.is_symlink, path):
        raise UsageError(f"{out} is a link that leads in a circle. Name another output")
    if status is not None and (what := files.get(_id(status))):
        raise UsageError(f"{out} is {what}. Name another output")
    if status is not None and (what := folders.get(_id(status))):
        raise UsageError(f"{out} is {what} itself. Name another output")
    for folder in path.parents:
        status = _status(folder)
        if status is not None and (what := folders.get(_id(status))):
            raise UsageError(f"{out} lies inside {what} {folder}. Write outside of it")
    for ending in _SCRATCH:
        status = _status(path.with_name(path.name[:200] + ending)) if path.name else None
        if status is not None and (what := files.get(_id(status)) or folders.get(_id(status))):
            raise UsageError(f"{out} is named {ending} while it is written, and that is {what}. Name another output")
    if not known(Path.is_dir, path):
        return
    for given in read:
        if path in Path(os.path.realpath(given)).parents:
            raise UsageError(f"{out} holds {given}, which is read. Name another output")
    for name, entry in _files(path):
        if what := files.get(entry):
            raise UsageError(f"{out} holds {name}, which is {what}. Name another output")


def _files(folder: Path) -> Iterator[tuple[str, Id]]:
    """The files of a folder, links followed."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:  # an error where it is read
        return
    for path in paths:
        status = _status(path)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            yield path.name, _id(status)


def _status(path: Path | int) -> os.stat_result | None:
    """None for what is not there, and for pipes, sockets and character devices, which hold nothing to be lost."""
    try:
        status = os.fstat(path) if isinstance(path, int) else path.stat()
    except (OSError, ValueError, RuntimeError):
        return None
    mode = status.st_mode
    return None if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode) else status


def _id(status: os.stat_result) -> Id:
    return status.st_dev, status.st_ino


def _is_device(path: Path) -> bool:
    return not is_stdout(path) and known(Path.exists, path) and _status(path) is None


def _has_size(path: Path, nbytes: int) -> bool:
    status = _status(path)
    return status is not None and stat.S_ISREG(status.st_mode) and status.st_size == nbytes


def _holds(path: Path, nbytes: int, digest: str) -> bool:
    """Whether a file has this size and digest; it is read only where its size is right."""
    if not _has_size(path, nbytes):
        return False
    try:
        return blake3().update_mmap(path).hexdigest() == digest
    except OSError:
        return False
