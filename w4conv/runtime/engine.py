"""Model and Session: the native forward pass on the weights of an open container."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from w4conv import _native, kernels
from w4conv.container import Container, TensorInfo, open_container
from w4conv.errors import InputError, UsageError
from w4conv.models import parse_config
from w4conv.models.spec import ModelSpec, TensorSpec
from w4conv.scheme import TILE_ROWS, QuantScheme

F32Array = npt.NDArray[np.float32]
ACTIVATION_BITS: Final = {"int16": 16, "int8": 8}
# Scheme, (n_rows, n_columns), and raw parts as in the container.
Matrix = tuple[QuantScheme, tuple[int, int], Mapping[str, npt.NDArray[np.uint8]]]


class TokenSampler(Protocol):
    """Chooses the next token from logits of shape (vocab_size,)."""

    def __call__(self, logits: F32Array) -> int: ...


def _new_native(
    spec: ModelSpec, *, n_layers: int, windows: Sequence[int], threads: int | None, activations: str
) -> _native.Model:
    if activations not in ACTIVATION_BITS:
        raise UsageError(f"activations {activations!r} are neither {' nor '.join(ACTIVATION_BITS)}")
    return _native.new_model(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        n_layers=n_layers,
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        norm_eps=spec.norm_eps,
        inverse_frequencies=list(spec.rope.inverse_frequencies(spec.head_dim)),
        windows=list(windows),
        threads=threads or kernels.default_threads(),
        activation_bits=ACTIVATION_BITS[activations],
    )


class Model:
    """A `.w4` file ready to run. Weights stay in the mapping; nothing is repacked.

    path: a `.w4` file, or a Container already open (which the caller then closes).
    threads: default `kernels.default_threads()`.
    ctx: most tokens of a session; default, and at most, the model's own limit.
    kv: "f16", or "f32" for keys and values kept in float32 (the reference).
    activations: "int16", or "int8" for faster products with integer weights that are less exact (docs/numerics.md 2).

    Raises InputError when the file's model cannot be run, UsageError for impossible options.
    """

    def __init__(
        self,
        path: str | Path | Container,
        *,
        threads: int | None = None,
        ctx: int | None = None,
        kv: str = "f16",
        activations: str = "int16",
    ) -> None:
        if kv not in ("f16", "f32"):
            raise UsageError(f"kv {kv!r} is neither f16 nor f32")
        if threads is not None and not 1 <= threads <= 1024:
            raise UsageError(f"threads {threads} is not between 1 and 1024")
        self._owned = not isinstance(path, Container)
        self.container = path if isinstance(path, Container) else open_container(Path(path))
        self.threads = threads or kernels.default_threads()
        self.isa = kernels.isa_tier()
        self.kv = kv
        self.activations = activations
        self.spec = parse_config(json.loads(self.container.blobs["config.json"]))
        if ctx is not None and not 1 <= ctx <= self.spec.max_positions:
            raise UsageError(
                f"ctx {ctx} is not between 1 and {self.spec.max_positions}, the limit of {self.container.path}"
            )
        self.ctx = ctx or self.spec.max_positions
        self._native = self._load()

    def _load(self) -> _native.Model:
        spec = self.spec
        native = _new_native(
            spec,
            n_layers=spec.n_layers,
            windows=spec.sliding_windows,
            threads=self.threads,
            activations=self.activations,
        )
        for tensor in spec.tensors():
            info = self._info(tensor)
            layer = -1 if tensor.layer is None else tensor.layer
            if tensor.role in ("norm", "bias"):
                native.set_vector(layer, tensor.part, self.container.dequantize(tensor.name))
                continue
            parts = {part.kind: self.container.bytes_of(part) for part in info.parts}
            n_rows, n_columns = info.shape
            native.set_linear(layer, tensor.part, kernels.matrix_parts(info.scheme, (n_rows, n_columns), parts))
        return native

    def _info(self, tensor: TensorSpec) -> TensorInfo:
        info = self.container.tensors.get(tensor.name)
        if info is None:
            raise InputError(f"{self.container.path}: {tensor.name} is missing, so the model cannot be run")
        if tuple(info.shape) != tensor.shape:
            raise InputError(
                f"{self.container.path}: {tensor.name} has shape {tuple(info.shape)}; "
                f"the file's config.json asks for {tensor.shape}"
            )
        return info

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes that decoding one token reads: layers, norms and head whole, one row of the embedding."""
        total = 0
        for tensor in self.spec.tensors():
            nbytes = sum(part.nbytes for part in self.container.tensors[tensor.name].parts)
            if tensor.role == "embedding" and not self.spec.tied_head:
                nbytes //= self.spec.vocab_size
            total += nbytes
        return total

    def session(self) -> Session:
        """An empty sequence with room for `ctx` tokens; memory is taken only as tokens arrive."""
        return Session(self._native, self._native.session(self.ctx, self.kv == "f32"), self.spec.vocab_size)

    def logits(self, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> F32Array:
        """Logits after each token of a fresh sequence: (n_tokens, vocab_size) float32."""
        return self.session().append(token_ids, all_logits=True)

    def generate(
        self,
        prompt_ids: Sequence[int] | npt.NDArray[np.integer],
        *,
        max_tokens: int,
        sampler: TokenSampler | None = None,
        stop_ids: Sequence[int] = (),
    ) -> Iterator[int]:
        """Token ids that follow the prompt, one at a time; a stop id ends the run and is not yielded.

        sampler: default greedy (the first of equal maxima). The run also ends when the session is full.
        """
        session, stops = self.session(), frozenset(stop_ids)
        logits = session.append(prompt_ids)[0]
        for n in range(max_tokens):
            token = int(np.argmax(logits)) if sampler is None else sampler(logits)
            if token in stops:
                return
            yield token
            if n + 1 == max_tokens or session.n_tokens == self.ctx:
                return
            logits = session.append([token])[0]

    def close(self) -> None:
        """Drop the native model, and close the container if this object opened it."""
        del self._native
        if self._owned:
            self.container.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Session:
    """The keys and values of one sequence; made by Model.session()."""

    def __init__(self, model: _native.Model, session: _native.Session, vocab_size: int) -> None:
        self._model, self._session, self._vocab_size = model, session, vocab_size

    @property
    def n_tokens(self) -> int:
        return self._session.n_tokens

    def append(self, token_ids: Sequence[int] | npt.NDArray[np.integer], *, all_logits: bool = False) -> F32Array:
        """Run tokens through the model: logits (1, vocab_size) after the last, or (n_tokens, vocab_size) after each.

        However tokens are split over calls, the bits are the same. Raises UsageError when there is nothing to append,
        no room for it, or an id is outside the vocabulary; nothing is appended then.
        """
        ids = np.ascontiguousarray(token_ids, np.int64)
        if ids.ndim != 1 or ids.size == 0:
            raise UsageError("there is no token to append; give at least one")
        if self.n_tokens + ids.size > self._session.n_positions:
            raise UsageError(
                f"{ids.size} more tokens do not fit: the session holds {self.n_tokens} of at most "
                f"{self._session.n_positions}; raise ctx or shorten the text"
            )
        bad = ids[(ids < 0) | (ids >= self._vocab_size)]
        if bad.size:
            raise UsageError(f"token id {bad[0]} is outside the vocabulary of {self._vocab_size}")
        out = np.empty((ids.size if all_logits else 1, self._vocab_size), np.float32)
        # Pieces of the native limit, so that an interrupt is seen between them.
        for start in range(0, ids.size, _native.MAX_TOKENS):
            piece = ids[start : start + _native.MAX_TOKENS].astype(np.int32)
            self._model.forward(self._session, piece, out[start : start + piece.size] if all_logits else out)
        return out

    def truncate(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens`."""
        if not 0 <= n_tokens <= self.n_tokens:
            raise UsageError(f"cannot cut a session of {self.n_tokens} tokens to {n_tokens}")
        self._session.truncate(n_tokens)


class Captured(NamedTuple):
    """Rows that the products of a layer read: qkv and gate_up (n, hidden_size), o (n, n_heads * head_dim), down
    (n, intermediate_size), float32."""

    qkv: F32Array
    o: F32Array
    gate_up: F32Array
    down: F32Array


class LayerModel:
    """One decoder layer by itself, for runs in which the model passes by layer after layer.

    parts: raw parts (uint8 arrays, as in the container) of each matrix by its place such as "q_proj", with its scheme;
    vectors: float32 arrays by place, such as "input_layernorm" and "q_proj.bias". The arrays are kept alive here.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        matrices: Mapping[str, tuple[QuantScheme, tuple[int, int], Mapping[str, npt.NDArray[np.uint8]]]],
        vectors: Mapping[str, F32Array],
        *,
        threads: int | None = None,
        activations: str = "int16",
    ) -> None:
        self._spec, self._kept = spec, matrices
        windows = spec.sliding_windows[layer : layer + 1]
        self._native = _new_native(spec, n_layers=1, windows=windows, threads=threads, activations=activations)
        for part, values in vectors.items():
            self._native.set_vector(0, part, values)
        for part, matrix in matrices.items():
            self._native.set_linear(0, part, kernels.matrix_parts(*matrix))

    def run(self, hidden: F32Array, *, capture: bool = False) -> Captured | None:
        """Take one sequence (n_tokens, padded hidden_size) through the layer, in place.

        capture: hand out copies of the rows that its products read.
        """
        n, spec = len(hidden), self._spec
        attended = spec.n_heads * spec.head_dim
        widths = (spec.hidden_size, attended, spec.hidden_size, spec.intermediate_size)
        captured = [np.empty((n if capture else 0, padded_width(w)), np.float32) for w in widths]
        session = self._native.session(n, False)
        for start in range(0, n, _native.MAX_TOKENS):
            piece = slice(start, min(start + _native.MAX_TOKENS, n))
            self._native.run_layer(session, 0, hidden[piece], *(c[piece] for c in captured))
        return Captured(*(c[:, :w] for c, w in zip(captured, widths, strict=True))) if capture else None


class HeadModel:
    """The final norm and the head by themselves: from the hidden rows that the last layer gives to logits.

    head: kept alive here. norm: float32.
    """

    def __init__(
        self,
        spec: ModelSpec,
        head: Matrix,
        norm: F32Array,
        *,
        threads: int | None = None,
        activations: str = "int16",
    ) -> None:
        self._spec, self._kept = spec, head
        self._native = _new_native(spec, n_layers=1, windows=(), threads=threads, activations=activations)
        self._native.set_vector(-1, "norm", norm)
        self._native.set_linear(-1, "lm_head", kernels.matrix_parts(*head))

    def logits(self, hidden: F32Array) -> F32Array:
        """(n_tokens, padded hidden_size) -> (n_tokens, vocab_size) float32, the very bits of a `Model`."""
        out = np.empty((len(hidden), self._spec.vocab_size), np.float32)
        for start in range(0, len(hidden), _native.MAX_TOKENS):
            piece = slice(start, start + _native.MAX_TOKENS)
            self._native.finish(np.ascontiguousarray(hidden[piece]), out[piece])
        return out


def padded_width(n: int) -> int:
    """Floats of a row of n as the native code wants it."""
    return -(-n // TILE_ROWS) * TILE_ROWS
