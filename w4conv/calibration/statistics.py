"""Statistics of activations on a calibration set, by hook; saved once, used by many conversions.

The file is safetensors. For each layer i and hook p (qkv, o, gate_up, down), and for the inputs of the head, F32:

    layers.i.p.mean, head.mean                   (2, n)      n channels
    layers.i.p.mean_square, head.mean_square     (2, n)
    layers.i.p.moments, head.moments             (2, n, n)   mean of x x^T; optional

Index 0 is over the tokens to fit, index 1 over the held-out tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from w4conv import codes, kernels
from w4conv.arrays import F32Array
from w4conv.calibration.text import CalibrationSet, is_held_out
from w4conv.errors import InputError
from w4conv.files.blobs import parse_json_object
from w4conv.files.mapped import MappedFile
from w4conv.files.strict_json import to_json
from w4conv.files.target import Target
from w4conv.models.spec import ModelSpec
from w4conv.progress import Progress
from w4conv.quantization.folding import HOOKS
from w4conv.quantization.moments import Moments
from w4conv.runtime.layers import LayeredSource, final_norm
from w4conv.sources.base import Source
from w4conv.sources.safetensors import Entry, read_header

FORMAT: Final = "w4conv statistics 1"
HEAD: Final = "head"
_BLOCK_NBYTES: Final = 1 << 22
_SAMPLED_ROWS: Final = 16  # of each matrix, in the digest that identifies a checkpoint
_RECORDED: Final = ("text_blake3", "tokens", "ctx", "held_out_sequences")
# Of the set built in; and of a text, where it is "text".
_OF_A_SET: Final = ("set", "set_version", "set_blake3", "chat_dialogues", "special_tokens")


class SecondMoments(NamedTuple):
    """Mean over tokens of x x^T, x the rows at a hook: (n, n) each, of the tokens to fit and the held-out tokens."""

    fit: F32Array
    held_out: F32Array


class _Sums:
    """Running sums of one hook."""

    def __init__(self, n_channels: int, *, full: bool) -> None:
        self._n = 0
        self._sum, self._squares = np.zeros(n_channels), np.zeros(n_channels)
        self._moments = Moments(n_channels) if full else None

    def add(self, x: F32Array, threads: int | None) -> None:
        """x: (n_tokens, n_channels). Float32 sums in one fixed order, added up in float64."""
        ones, across = np.ones((1, len(x)), np.float32), np.ascontiguousarray(x.T)
        self._sum += kernels.gemm_nt(across, ones, threads=threads)[:, 0]
        self._squares += kernels.gemm_nt(across * across, ones, threads=threads)[:, 0]
        self._n += len(x)
        if self._moments is not None:
            self._moments.add(x, threads=threads)

    def means(self) -> dict[str, F32Array]:
        n = max(self._n, 1)
        found = {"mean": (self._sum / n).astype(np.float32), "mean_square": (self._squares / n).astype(np.float32)}
        return found if self._moments is None else found | {"moments": self._moments.matrix()}


@dataclass(frozen=True, slots=True)
class HookStatistics:
    """mean, mean_square: (2, n); moments: (2, n, n) or None. Index 0: tokens to fit; 1: held-out tokens."""

    mean: F32Array
    mean_square: F32Array
    moments: F32Array | None = None

    def second_moments(self) -> SecondMoments:
        """The full moments; or without them, those of channels that are independent around their means."""
        if self.moments is not None:
            return SecondMoments(*self.moments)
        variance = np.maximum(self.mean_square - self.mean * self.mean, 0)
        return SecondMoments(*(np.diag(v) + np.multiply.outer(m, m) for m, v in zip(self.mean, variance, strict=True)))


def observe(
    source: Source, spec: ModelSpec, sequences: npt.NDArray[np.int64], *, full: bool, threads: int | None
) -> Iterator[dict[str, HookStatistics]]:
    """Statistics of each layer, by hook; then those of the head.

    Memory holds the hidden states of all tokens, and the weights and sums of one layer.
    full: with moments. Raises InputError where activations are not finite.
    """
    model = LayeredSource(source, threads=threads)
    hidden = model.embed(sequences)

    def summed(rows_of: Iterator[dict[str, F32Array]]) -> dict[str, HookStatistics]:
        sums: dict[str, tuple[_Sums, _Sums]] = {}
        for i, hooks in enumerate(rows_of):
            for hook, rows in hooks.items():
                if not np.isfinite(rows).all():
                    raise InputError(f"{source.path}: the model's activations are not finite; its weights are broken")
                if hook not in sums:
                    sums[hook] = (_Sums(rows.shape[1], full=full), _Sums(rows.shape[1], full=full))
                sums[hook][is_held_out(i)].add(rows, threads)
        means = {hook: [part.means() for part in pair] for hook, pair in sums.items()}
        return {
            hook: HookStatistics(**{kind: np.stack([a[kind], b[kind]]) for kind in a}) for hook, (a, b) in means.items()
        }

    for i in range(spec.n_layers):
        layer = model.layer(i, threads=threads).model
        yield summed(captured._asdict() for captured in (layer.run(s, capture=True) for s in hidden) if captured)
    norm = model.final_norm_weight()
    yield summed({HEAD: final_norm(spec, s, norm, threads=threads)} for s in hidden)


class Statistics(ABC):
    """An open file of statistics; only the mapping is held.

    full: whether it has second moments. digest: BLAKE3 of the file, hexadecimal.
    """

    path: Path
    digest: str
    full: bool

    @abstractmethod
    def check(self, source: Source, spec: ModelSpec) -> None:
        """Raises InputError when the statistics are of another model. Call it before the methods below."""

    @abstractmethod
    def at_hook(self, layer: int | None, hook: str) -> HookStatistics:
        """layer: None for the head. Raises InputError."""

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """For the provenance of a container."""

    def layers(self, spec: ModelSpec) -> Iterator[dict[str, HookStatistics]]:
        for i in range(spec.n_layers):
            yield {hook: self.at_hook(i, hook) for hook in HOOKS}


class SavedStatistics(Statistics):
    """A file written by `calibrate`."""

    def __init__(self, path: Path) -> None:
        """Raises InputError."""
        self.path = path
        self._file = MappedFile(path)
        self._entries = read_header(self._file)
        length = int.from_bytes(self._file.view(0, 8).tobytes(), "little")
        header = parse_json_object(self._file.view(8, length).tobytes(), f"{path}: header")
        about = header.get("__metadata__")
        self._about: dict[str, str] = about if isinstance(about, dict) else {}  # of strings: read_header has checked
        if self._about.get("format") != FORMAT:
            raise InputError(f"{path}: is no file of statistics of `w4conv calibrate`: its format is not {FORMAT!r}")
        self.full = any(name.endswith(".moments") for name in self._entries)
        self.digest = file_digest(self._file)

    def check(self, source: Source, spec: ModelSpec) -> None:
        wrong = f"{self.path}: is of another model than {source.path}"
        if self._about.get("architecture") != spec.architecture:
            raise InputError(f"{wrong}: its architecture is {self._about.get('architecture')}, not {spec.architecture}")
        for name, n in _channels(spec).items():
            for kind, shape in (("mean", (2, n)), ("mean_square", (2, n)), ("moments", (2, n, n))):
                if kind == "moments" and not self.full:
                    continue
                entry = self._entries.get(f"{name}.{kind}")
                if entry is None or (entry.dtype, entry.shape) != ("F32", shape):
                    found = "is missing" if entry is None else f"is {entry.dtype} {list(entry.shape)}"
                    raise InputError(f"{wrong}: {name}.{kind} {found}, expected F32 {list(shape)}")
        if self._about.get("model_blake3") != _digest_of_weights(source, spec):
            raise InputError(f"{wrong}: their weights differ. Observe this one with `w4conv calibrate`")

    def at_hook(self, layer: int | None, hook: str) -> HookStatistics:
        name = _name(layer, hook)
        mean, squares = self._read(f"{name}.mean"), self._read(f"{name}.mean_square")
        found = HookStatistics(mean, squares, self._read(f"{name}.moments") if self.full else None)
        if not all(np.isfinite(a).all() for a in (mean, squares, found.moments) if a is not None):
            raise InputError(f"{self.path}: {name}: a value is not finite; the file is damaged")
        return found

    def record(self) -> dict[str, Any]:
        keys = [*(key for key in _OF_A_SET if key in self._about), *_RECORDED]
        return {"statistics_blake3": self.digest} | {key: _number(self._about.get(key)) for key in keys}

    def _read(self, name: str) -> F32Array:
        entry: Entry = self._entries[name]
        raw = self._file.view(entry.offset, entry.nbytes)
        return np.frombuffer(raw.tobytes(), np.float32).reshape(entry.shape)


def file_digest(file: MappedFile) -> str:
    state = blake3()
    for start in range(0, file.nbytes, _BLOCK_NBYTES):
        state.update(file.view(start, min(_BLOCK_NBYTES, file.nbytes - start)).data)
    return state.hexdigest()


class StatisticsLayout:
    """Layout of a statistics file. nbytes: its size; n_hooks: over all layers, and the head."""

    def __init__(self, source: Source, spec: ModelSpec, text: CalibrationSet, *, full: bool) -> None:
        channels = _channels(spec)
        self._head = _header(source, spec, text, full=full)
        self.nbytes = len(self._head) + sum(4 * 2 * n * (2 + n * full) for n in channels.values())
        self.n_hooks = len(channels)
        self.signature = self._head[:64]

    def write(self, target: Target, layers: Iterator[dict[str, HookStatistics]], progress: Progress) -> str:
        """Write what `observe` yields; returns the digest of the file, BLAKE3, hexadecimal."""
        state = blake3(self._head)
        target.write(self._head)
        for i, hooks in enumerate(layers):
            for hook, found in hooks.items():
                for values in (found.mean, found.mean_square, found.moments):
                    if values is not None:
                        data = np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8).data
                        target.write(data)
                        state.update(data)
                progress.advance(1, _name(None if hook == HEAD else i, hook))
        return state.hexdigest()


def n_channels(spec: ModelSpec, hook: str) -> int:
    return {"o": spec.n_heads * spec.head_dim, "down": spec.intermediate_size}.get(hook, spec.hidden_size)


def _number(word: str | None) -> int | str:
    return int(word) if word and word.isascii() and word.isdigit() and len(word) < 16 else (word or "")


def _name(layer: int | None, hook: str) -> str:
    return hook if layer is None else f"layers.{layer}.{hook}"


def _channels(spec: ModelSpec) -> dict[str, int]:
    """Names of hooks and their channels, in the order of the file."""
    hooks = {_name(i, hook): n_channels(spec, hook) for i in range(spec.n_layers) for hook in HOOKS}
    return hooks | {HEAD: n_channels(spec, HEAD)}


def _header(source: Source, spec: ModelSpec, text: CalibrationSet, *, full: bool) -> bytes:
    about = {"format": FORMAT, "architecture": spec.architecture, "model_blake3": _digest_of_weights(source, spec)}
    record = {key: str(value) for key, value in text.record().items()}
    entries: dict[str, Any] = {"__metadata__": about | record}
    end = 0
    for name, n in _channels(spec).items():
        for kind, shape in (("mean", [2, n]), ("mean_square", [2, n]), ("moments", [2, n, n]))[: 3 if full else 2]:
            begin, end = end, end + 4 * math.prod(shape)
            entries[f"{name}.{kind}"] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    raw = to_json(entries, where="statistics", separators=(",", ":"), ensure_ascii=True)
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def _digest_of_weights(source: Source, spec: ModelSpec) -> str:
    """Identifies the checkpoint: BLAKE3 of its vectors and of some middle rows of each matrix, as float32."""
    state = blake3()
    for t in spec.tensors():
        middle = t.shape[0] // 2 // _SAMPLED_ROWS * _SAMPLED_ROWS
        values = source.read(t.name, slice(middle, middle + _SAMPLED_ROWS) if len(t.shape) > 1 else None)
        state.update(codes.as_f32(values, source.tensors[t.name].dtype).astype("<f4", copy=False).tobytes())
    return state.hexdigest()
