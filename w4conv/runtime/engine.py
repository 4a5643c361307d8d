"""Model and Session: the native forward pass on the weights of an open container."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from w4conv import _native, kernels
from w4conv.container import Container, TensorInfo, open_container
from w4conv.errors import InputError, UsageError
from w4conv.models import parse_config
from w4conv.models.spec import ModelSpec, TensorSpec
from w4conv.quantization.generic import refuse_to_run
from w4conv.scheme import TILE_ROWS, QuantScheme

F32Array = npt.NDArray[np.float32]
ACTIVATION_BITS: Final = {"int16": 16, "int8": 8}
KV_KINDS: Final = ("f16", "int8", "f32")
KV_PINNED: Final = TILE_ROWS  # first tokens of a sequence that stay when a budget drops others
KV_LEAST: Final = 64  # newest tokens that a budget has to hold
# Scheme, shape (of a stack: with the number of matrices in front), and raw parts as in the container.
Matrix = tuple[QuantScheme, tuple[int, ...], Mapping[str, npt.NDArray[np.uint8]]]


class TokenSampler(Protocol):
    """Chooses the next token from logits of shape (vocab_size,)."""

    def __call__(self, logits: F32Array) -> int: ...


def _new_native(
    spec: ModelSpec, layers: Sequence[int], *, n_positions: int, threads: int | None, activations: str
) -> _native.Model:
    """An engine for some layers of the model, without weights."""
    if activations not in ACTIVATION_BITS:
        raise UsageError(f"activations {activations!r} are neither {' nor '.join(ACTIVATION_BITS)}")
    c = _native.ModelConfig()
    c.vocab_size, c.hidden_size, c.norm_eps = spec.vocab_size, spec.hidden_size, spec.norm_eps
    c.n_heads, c.n_kv_heads, c.head_dim = spec.n_heads, spec.n_kv_heads, spec.head_dim
    c.attention_scale = spec.attention_scale or spec.head_dim**-0.5
    c.attention_softcap, c.final_softcap = spec.attention_softcap, spec.final_softcap
    c.embedding_scale, c.residual_scale = spec.embedding_scale, spec.residual_scale
    c.logits_divisor, c.interleaved = spec.logits_divisor, spec.interleaved
    c.activation_bits = ACTIVATION_BITS[activations]
    c.set_activation(spec.activation)
    if spec.experts is not None:
        c.n_experts_per_token, c.renormalized = spec.experts.n_per_token, spec.experts.renormalized
    for _, table in spec.rope_tables(n_positions):
        c.add_rope(*table)
    for layer in layers:
        c.add_layer(spec.rope_index(layer), spec.window(layer))
    return _native.new_model(c, threads or kernels.default_threads())


def _set_matrix(native: _native.Model, t: TensorSpec, layer: int, matrix: Matrix) -> None:
    scheme, shape, parts = matrix
    if len(shape) == 2:
        stack = [(-1 if t.expert is None else t.expert, parts)]
    else:  # the matrices of all experts, one after another
        stack = [(i, {kind: part.reshape(shape[0], -1)[i] for kind, part in parts.items()}) for i in range(shape[0])]
    for expert, own in stack:
        native.set_linear(layer, expert, t.part, kernels.matrix_parts(scheme, (shape[-2], shape[-1]), own))


def _set_vector(native: _native.Model, t: TensorSpec, layer: int, values: F32Array, norm_offset: float) -> None:
    if t.part == "sinks":
        native.set_sinks(layer, values)
    elif t.role == "norm":
        native.set_norm(layer, t.part, values + np.float32(norm_offset))
    else:
        rows = values if values.ndim == 2 else values[None]
        experts = range(len(rows)) if values.ndim == 2 else [-1 if t.expert is None else t.expert]
        for expert, row in zip(experts, rows, strict=True):
            native.set_bias(layer, expert, t.part.removesuffix(".bias"), np.ascontiguousarray(row))


class Model:
    """A `.w4` file ready to run. Weights stay in the mapping; nothing is repacked.

    path: a `.w4` file, or a Container already open (which the caller then closes).
    threads: default `kernels.default_threads()`.
    ctx: most tokens of a session; default, and at most, the model's own limit.
    kv: how keys and values are kept: "f16", "int8", or "f32" (the reference).
    kv_memory: most bytes of keys and values of a session. Where the whole context does not fit, layers see the first
        KV_PINNED tokens and the newest `kv_window` ones.
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
        kv_memory: int | None = None,
        activations: str = "int16",
    ) -> None:
        if kv not in KV_KINDS:
            raise UsageError(f"kv {kv!r} is none of {', '.join(KV_KINDS)}")
        if threads is not None and not 1 <= threads <= 1024:
            raise UsageError(f"threads {threads} is not between 1 and 1024")
        self._owned = not isinstance(path, Container)
        self.container = path if isinstance(path, Container) else open_container(Path(path))
        self.threads = threads or kernels.default_threads()
        self.isa = kernels.isa_tier()
        self.kv = kv
        self.activations = activations
        refuse_to_run(self.container.path, self.container.provenance)
        self.spec = parse_config(json.loads(self.container.blobs["config.json"]))
        if ctx is not None and not 1 <= ctx <= self.spec.max_positions:
            raise UsageError(
                f"ctx {ctx} is not between 1 and {self.spec.max_positions}, the limit of {self.container.path}"
            )
        self.ctx = ctx or self.spec.max_positions
        self._native = self._load()
        self.kv_window = 0 if kv_memory is None else self._window_within(kv_memory)

    def kv_nbytes(self, window: int) -> int:
        """Bytes that the keys and values of a full session take where layers see at most `window` of the newest tokens,
        and the first KV_PINNED ones; 0: where all see what they want."""
        return self._native.session_nbytes(self.ctx, self.kv, window)

    def _window_within(self, nbytes: int) -> int:
        """The highest window of `kv_nbytes` that so many bytes hold; 0 when they hold a whole context."""
        if self.kv_nbytes(0) <= nbytes:
            return 0
        windows = range(KV_LEAST, self.ctx)
        n = bisect.bisect_right(windows, nbytes, key=self.kv_nbytes)
        if n == 0:
            raise UsageError(
                f"kv-memory of {nbytes:,} bytes is too small for {self.container.path}: {KV_LEAST} tokens at a time "
                f"take {self.kv_nbytes(KV_LEAST):,} bytes as {self.kv}, the whole context of {self.ctx:,} takes "
                f"{self.kv_nbytes(0):,}"
            )
        return windows[n - 1]

    def _load(self) -> _native.Model:
        spec = self.spec
        native = _new_native(
            spec,
            range(spec.n_layers),
            n_positions=self.ctx,
            threads=self.threads,
            activations=self.activations,
        )
        for tensor in spec.tensors():
            info = self._info(tensor)
            layer = -1 if tensor.layer is None else tensor.layer
            if tensor.role in ("norm", "bias"):
                _set_vector(native, tensor, layer, self.container.dequantize(tensor.name), spec.norm_offset)
                continue
            parts = {part.kind: self.container.bytes_of(part) for part in info.parts}
            _set_matrix(native, tensor, layer, (info.scheme, tensor.shape, parts))
        native.check_shapes()
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
        """Weight bytes that decoding one token reads: layers, norms and head whole, of experts those that a token goes
        to, one row of the embedding."""
        total = 0
        for tensor in self.spec.tensors():
            nbytes = sum(part.nbytes for part in self.container.tensors[tensor.name].parts)
            total += self.spec.used_by_token(tensor, nbytes)
        return total

    def restart_stopwatch(self) -> None:
        """From now on count where the time of forward passes goes, from zero."""
        self._native.restart_stopwatch()

    def part_seconds(self) -> dict[str, float]:
        """Seconds by part since `restart_stopwatch`: "products" with the layers' weights, "attention" over keys and
        values, the "head", and the "rest": norms, rotations, making inputs ready."""
        rest, products, attention, head = self._native.part_seconds()
        return {"products": products, "attention": attention, "head": head, "rest": rest}

    def session(self) -> Session:
        """An empty sequence with room for `ctx` tokens; memory is taken only as tokens arrive."""
        native = self._native.session(self.ctx, self.kv, self.kv_window)
        return Session(self._native, native, self.spec, window=self.kv_window, after_pass=self._release_embedding)

    def _release_embedding(self) -> None:
        """A row of the embedding lies in a tile of 16, and a fault maps the pages around it too: many times what
        tokens read would stay in memory."""
        if not self.spec.tied_head:  # else each token reads all of it
            self.container.release(self.spec.tensors()[0].name)

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
    """The keys and values of one sequence; made by Model.session().

    The logits after a token are those of the sequence up to it, however tokens are split over calls. Tokens are kept to
    run them again where that takes it: when the rotary embedding changes with the length of a sequence ("longrope"), or
    when a cut makes keys visible again that a window no longer held.
    """

    def __init__(
        self,
        model: _native.Model,
        session: _native.Session,
        spec: ModelSpec,
        *,
        window: int = 0,
        after_pass: Callable[[], None],
    ) -> None:
        self._model, self._session, self._vocab_size = model, session, spec.vocab_size
        self._after_pass, self._n_since = after_pass, 0  # called when so many tokens have run as a pass holds
        self._short, self._n_ropes = spec.long_after, len(spec.ropes)
        self._ids = np.empty(session.n_positions, np.int32)
        self._window = window

    @property
    def n_tokens(self) -> int:
        return self._session.n_tokens

    @property
    def n_dropped(self) -> int:
        """Tokens that the next one will not see any more, as `kv_memory` has no room for them."""
        return max(0, self.n_tokens + 1 - self._window - KV_PINNED) if self._window else 0

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
        tokens, before = ids.astype(np.int32), self.n_tokens
        self._ids[before : before + tokens.size] = tokens
        if self._short is None:
            self._run(tokens, out)
            return out
        n_short = min(max(self._short - before, 0), tokens.size)
        if n_short and (all_logits or n_short == tokens.size):
            self._run(tokens[:n_short], out[:n_short])
        if n_short < tokens.size:
            if self._session.rope_offset == 0:
                self._restart(before + n_short, rope_offset=self._n_ropes)
            self._run(tokens[n_short:], out[n_short:] if all_logits else out)
        return out

    def _run(self, tokens: npt.NDArray[np.int32], out: F32Array) -> None:
        # Pieces of the native limit, so that an interrupt is seen between them.
        for start in range(0, tokens.size, _native.MAX_TOKENS):
            piece = tokens[start : start + _native.MAX_TOKENS]
            last = start + piece.size == tokens.size
            rows = out[start : start + piece.size] if len(out) == tokens.size else out if last else out[:0]
            self._model.forward(self._session, piece, rows)
            self._n_since += piece.size
            if self._n_since >= _native.MAX_TOKENS:
                self._after_pass()
                self._n_since = 0

    def _restart(self, n_tokens: int, *, rope_offset: int) -> None:
        """Run the first n_tokens again."""
        self._session.truncate(0)
        self._session.rope_offset = rope_offset
        if n_tokens:
            self._run(self._ids[:n_tokens], np.empty((1, self._vocab_size), np.float32))

    def truncate(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens`.

        Takes no time for the last few, such as drafts; a deeper cut may have to run what is left again.
        """
        if not 0 <= n_tokens <= self.n_tokens:
            raise UsageError(f"cannot cut a session of {self.n_tokens} tokens to {n_tokens}")
        if self._short is not None and n_tokens <= self._short and self._session.rope_offset:
            self._restart(n_tokens, rope_offset=0)
        elif not self._session.truncate(n_tokens):
            self._restart(n_tokens, rope_offset=self._session.rope_offset)


class Captured(NamedTuple):
    """Rows that the products of a layer read: qkv and gate_up (n, hidden_size), o (n, n_heads * head_dim), down
    (n, intermediate_size), or (n, 0) where the layer has experts, float32."""

    qkv: F32Array
    o: F32Array
    gate_up: F32Array
    down: F32Array


class LayerModel:
    """One decoder layer by itself, for runs in which the model passes by layer after layer.

    matrices: raw parts (uint8 arrays, as in the container) of each matrix by its `TensorSpec.place`, with its scheme;
    vectors: float32 arrays of norms and biases by place. The arrays are kept alive here.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        matrices: Mapping[str, Matrix],
        vectors: Mapping[str, F32Array],
        *,
        threads: int | None = None,
        activations: str = "int16",
        kv: str = "f16",
    ) -> None:
        self._spec, self._kept, self._kv = spec, matrices, kv
        self._routed = spec.routed(layer)
        self._native = _new_native(
            spec, [layer], n_positions=spec.max_positions, threads=threads, activations=activations
        )
        for t in spec.layer_tensors(layer):
            if t.role in ("norm", "bias"):
                _set_vector(self._native, t, 0, vectors[t.place], spec.norm_offset)
            else:
                _set_matrix(self._native, t, 0, matrices[t.place])
        self._native.check_shapes()

    def run(self, hidden: F32Array, *, capture: bool = False, attended: bool = False) -> Captured | None:
        """Take one sequence (n_tokens, padded hidden_size) through the layer, in place.

        capture: hand out copies of the rows that its products read. attended: `hidden` is what `observe` made of it for
        gate_up, and goes on from there.
        """
        captured = self._run(hidden, Captured._fields if capture else (), Captured._fields[-1], attended)
        return Captured(**captured) if capture else None

    def observe(self, hidden: F32Array, place: str, *, attended: bool = False) -> F32Array:
        """Take one sequence as far as the rows of `place`, a field of `Captured`, and return them.

        `hidden` is as it was for qkv, what is after the attention for o and gate_up, after the layer for down.
        attended: as in `run`.
        """
        return self._run(hidden, (place,), place, attended)[place]

    def _run(self, hidden: F32Array, wanted: Sequence[str], last: str, attended: bool) -> dict[str, F32Array]:
        n, spec = len(hidden), self._spec
        of_heads = spec.n_heads * spec.head_dim
        inner = 0 if self._routed else spec.intermediate_size
        widths = dict(zip(Captured._fields, (spec.hidden_size, of_heads, spec.hidden_size, inner), strict=True))
        captured = {
            place: np.empty((n if place in wanted else 0, padded_width(w)), np.float32) for place, w in widths.items()
        }
        until = {"qkv": 0, "o": 1, "gate_up": 1, "down": 2}[last]
        session = self._native.session(n, self._kv)
        if spec.long_after is not None and n > spec.long_after:
            session.rope_offset = len(spec.ropes)
        for start in range(0, n, _native.MAX_TOKENS):
            piece = slice(start, min(start + _native.MAX_TOKENS, n))
            self._native.run_layer(
                session,
                0,
                hidden[piece],
                **{place: c[piece] for place, c in captured.items()},
                until=until,
                attended=attended,
            )
        return {place: captured[place][:, : widths[place]] for place in wanted}


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
        self._native = _new_native(spec, [], n_positions=1, threads=threads, activations=activations)
        tensors = {t.part: t for t in spec.tensors() if t.layer is None}
        _set_vector(self._native, tensors["norm"], -1, norm, spec.norm_offset)
        _set_matrix(self._native, tensors.get("lm_head", tensors["embed_tokens"]), -1, head)
        self._native.check_shapes()

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
