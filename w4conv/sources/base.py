"""Source: a checkpoint as a set of named tensors, read one at a time (or a block of rows at a time)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a checkpoint, under its Hugging Face name.

    dtype: "F16", "BF16" or "F32": what `Source.read` returns.
    stored_as: the checkpoint's own word for its coding, such as "F16" or "Q4_1".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored_as: str


class Source(ABC):
    """A checkpoint opened for reading. Opening reads headers only; `read` touches just the bytes it returns.

    kind: "safetensors" or "gguf".
    path: what the user named.
    files: the weight files and the sidecar files used, for digests, in a fixed order.
    tensors: name -> SourceTensor, names as in Hugging Face checkpoints whatever the file format.
    blobs: name -> bytes of what travels verbatim: "config.json" always; "generation_config.json", "tokenizer.json",
        "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja" where they exist.
    notes: one sentence each, of what the user should know (files left aside, parts rebuilt, tensors ignored).
    """

    kind: str
    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, SourceTensor]
    blobs: Mapping[str, bytes]
    notes: tuple[str, ...]

    @abstractmethod
    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[np.generic]:
        """Values of one tensor, C order, original shape: float16, float32, or uint16 holding BF16 bits.

        rows: a slice of the first axis without a step; only its bytes are read. Raises InputError when the file has
        shrunk since it was opened.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the mappings; arrays that `read` returned stay valid."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
