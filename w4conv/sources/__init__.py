"""Checkpoints: recognised by what is on disk, read through one interface."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Final

from w4conv.errors import InputError
from w4conv.sources.base import Source, SourceTensor
from w4conv.sources.huggingface import open_huggingface
from w4conv.sources.huggingface_files import PICKLE_ADVICE, PICKLE_SUFFIXES

__all__ = ["Source", "SourceTensor", "open_source"]

OTHER_FORMATS: Final = {
    ".onnx": "ONNX", ".xml": "OpenVINO", ".h5": "Keras", ".msgpack": "Flax", ".npz": "MLX or numpy",
    ".tflite": "TensorFlow Lite", ".nemo": "NeMo", ".mlmodel": "Core ML", ".pte": "ExecuTorch",
}  # fmt: skip
W4_MAGIC: Final = b"\x89W4C"


def open_source(path: Path, *, raw: bool = False, gptq_zero15: int | None = None) -> Source:
    """Open a checkpoint: a Hugging Face directory, a GGUF file, or a directory of ONNX. Links are followed.

    raw: a GGUF file of any architecture, its tensors under the names and in the order of rows that it has.
    gptq_zero15: what a stored zero point of 15 in a GPTQ checkpoint means, 16 or 0; None refuses it.
    Reads headers and sidecars only. Raises InputError, saying what the path is and what to do, for anything else.
    """
    path = Path(path)
    if path.is_dir():
        if (path / "model.onnx").is_file() and not any(path.glob("*.safetensors*")):
            from w4conv.sources.onnx import open_onnx  # onnx is an optional package

            return open_onnx(path)
        return open_huggingface(path, gptq_zero15=gptq_zero15)
    if not path.exists():
        raise InputError(f"{path}: no such file or directory{_near_name(path)}")
    if not path.is_file():
        raise InputError(f"{path}: not a file or a directory")
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    suffix = path.suffix.lower()
    if magic == b"GGUF" or suffix == ".gguf":
        from w4conv.sources.gguf import open_gguf  # the gguf package is loaded only where it is needed

        return open_gguf(path, raw=raw)
    if suffix == ".w4" or magic == W4_MAGIC:
        raise InputError(f"{path}: already converted: this is a .w4 file, not a checkpoint")
    if suffix == ".safetensors" or path.name.endswith(".index.json") or path.name in ("config.json", "model.onnx"):
        raise InputError(
            f"{path}: name the directory that holds it, {path.parent}: the model needs its config.json too"
        )
    if suffix in PICKLE_SUFFIXES or (magic[:2] in (b"\x80\x02", b"PK") and suffix not in OTHER_FORMATS):
        raise InputError(f"{path}: {PICKLE_ADVICE}")
    known = f"{OTHER_FORMATS[suffix]} is" if suffix in OTHER_FORMATS else "this file's format is"
    raise InputError(f"{path}: {known} not supported; name a Hugging Face directory with safetensors, or a GGUF file")


def _near_name(path: Path) -> str:
    """A hint at a sibling with nearly the same name."""
    try:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1, cutoff=0.7)
    except OSError:
        return f"; {path.parent} does not exist either" if not path.parent.exists() else ""
    return f"; is {path.parent / near[0]} meant?" if near else ""
