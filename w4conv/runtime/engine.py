"""Model and Session: the native forward pass on the weights of an open container."""

from __future__ import annotations

import bisect
import os
import threading
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, SupportsIndex

import numpy as np
import numpy.typing as npt

from w4conv import arguments, cpus, kernels
from w4conv.arguments import count, optional_count
from w4conv.arrays import F32Array
from w4conv.container import Container, TensorInfo, open_container
from w4conv.errors import ClosedError, InputError, UsageError
from w4conv.models import spec_of
from w4conv.models.generic import refuse_to_run
from w4conv.models.spec import TensorSpec
from w4conv.runtime.decode_loop import DecodeLoop, TokenSampler
from w4conv.runtime.native_model import NativeModel
from w4conv.runtime.sampling import Sampler, Sampling
from w4conv.scheme import TILE_ROWS

KV_KINDS: Final = ("f16", "int8", "f32")
KV_SINKS: Final = TILE_ROWS  # attention sinks: first tokens of a sequence, kept when kv_memory drops others
KV_LEAST: Final = 64  # newest tokens that a budget has to hold
TokenIds = Iterable[SupportsIndex] | npt.NDArray[np.integer]


class Model:
    """A `.w4` file ready to run. Weights stay in the mapping; nothing is repacked.

    path: a `.w4` file, or a Container already open (which the caller then closes).
    threads: default `cpus.default_threads()`.
    ctx: most tokens of a session; default, and at most, the model's own limit.
    kv: how keys and values are kept: "f16", "int8", or "f32" (the reference).
    kv_memory: most bytes of the KV cache of a session. Where the whole context does not fit, layers see the attention
        sinks (the first KV_SINKS tokens) and the newest `kv_window` tokens.
    activations: "int16", or "int8" for a faster but less exact GEMM with integer weights (docs/numerics.md 2).

    Threads may share a model, and a session: one call runs at a time. After `close`, which may come at any time and
    more than once, all that runs the model raises ClosedError, sessions and generators too. A container that was given
    may be closed before: its mapping stays until the model is closed.

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
        self.threads = cpus.thread_count(threads)
        kv_memory = optional_count(kv_memory, "kv-memory")
        self._owned = not isinstance(path, Container)
        self.container = path if isinstance(path, Container) else open_container(Path(path))
        self._engine: NativeModel | None = None
        try:
            self.isa = kernels.isa_tier()
            self.kv = kv
            self.activations = activations
            refuse_to_run(self.container.path, self.container.provenance)
            self.spec = spec_of(self.container.blobs)
            limit = self.spec.max_positions
            self.ctx = limit if ctx is None else count(ctx, "ctx", low=1)
            if self.ctx > limit:
                raise UsageError(f"ctx {self.ctx} is not between 1 and {limit}, the limit of {self.container.path}")
            self._engine = self._load()
            self.kv_window = 0 if kv_memory is None else self._window_within(kv_memory)
        except BaseException:
            self.close()
            raise

    def kv_nbytes(self, window: int) -> int:
        """Bytes of the KV cache of a full session whose layers see at most `window` newest tokens and the KV_SINKS
        first. window 0: no limit but the model's own."""
        return self.engine().native.session_nbytes(self.ctx, self.kv, window)

    def _window_within(self, nbytes: int) -> int:
        """The largest `window` whose `kv_nbytes` fit; 0 when the whole context fits."""
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

    def engine(self) -> NativeModel:
        """The engine of the model. Raises ClosedError."""
        engine = self._engine
        if engine is None:
            raise ClosedError(f"the model of {self.container.path} is closed")
        return engine

    def _load(self) -> NativeModel:
        spec = self.spec
        engine = NativeModel(spec, range(spec.n_layers), threads=self.threads, activations=self.activations)
        for tensor in spec.each_tensor():
            info = self._info(tensor)
            layer = -1 if tensor.layer is None else tensor.layer
            if tensor.role in ("norm", "bias"):
                engine.set_vector(tensor, layer, self.container.dequantize(tensor.name))
                continue
            parts = {part.kind: self.container.bytes_of(part) for part in info.parts}
            engine.set_matrix(tensor, layer, (info.scheme, tensor.shape, parts))
        engine.native.check_shapes()
        return engine

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
        """Weight bytes that decoding one token reads: layers, norms, head, the experts chosen for a token, and one row
        of the embedding."""
        total = 0
        for tensor in self.spec.tensors():
            nbytes = sum(part.nbytes for part in self.container.tensors[tensor.name].parts)
            total += self.spec.used_by_token(tensor, nbytes)
        return total

    def restart_stopwatch(self) -> None:
        """Start the timers of `part_seconds` from zero."""
        self.engine().native.restart_stopwatch()

    def part_seconds(self) -> dict[str, float]:
        """Seconds by part since `restart_stopwatch`: "linear" layers, "attention" over the KV cache, the "head", and
        the "rest": norms, RoPE, quantization of activations."""
        rest, linear, attention, head = self.engine().native.part_seconds()
        return {"linear": linear, "attention": attention, "head": head, "rest": rest}

    def session(self) -> Session:
        """An empty sequence with room for `ctx` tokens; memory is taken only as tokens arrive."""
        return Session(self)

    def release_embedding(self) -> None:
        """Release the pages of the embedding. A row lies in a tile of 16, and a fault maps the pages around it too, so
        many times what tokens read would stay in memory."""
        if not self.spec.tied_head:  # else each token reads all of it
            self.container.release(self.spec.tensors()[0].name)

    def logits(self, token_ids: TokenIds) -> F32Array:
        """Logits after each token of a fresh sequence: (n_tokens, vocab_size) float32."""
        return self.session().append(token_ids, all_logits=True)

    def generate(
        self,
        prompt_ids: TokenIds,
        *,
        max_tokens: int,
        sampler: TokenSampler | None = None,
        stop_ids: TokenIds = (),
    ) -> Iterator[int]:
        """Token ids that follow the prompt, one at a time; a stop id ends the run and is not yielded.

        sampler: default greedy (the first of equal maxima). The run also ends when the session is full.
        """
        prompt, most = arguments.token_ids(prompt_ids, self.spec.vocab_size), count(max_tokens, "max_tokens")
        stops = frozenset(arguments.token_ids(stop_ids, self.spec.vocab_size).tolist())
        loop = DecodeLoop(
            self.session(),
            prompt,
            n_positions=self.ctx,
            max_tokens=most,
            sampler=sampler or Sampler(Sampling()),
            stop_ids=stops,
        )
        return iter(loop)

    def close(self) -> None:
        """Drop the native model, once no thread runs it, and close the container if this object opened it."""
        self._engine = None
        if self._owned:
            self.container.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Session:
    """The keys and values of one sequence; made by Model.session().

    The logits after a token do not depend on how tokens are split over calls. Token ids are kept, since some calls run
    them again: when the RoPE tables change with the length of the sequence ("longrope"), or when `truncate` makes keys
    visible that a window has dropped. One thread at a time runs a call on a session.
    """

    def __init__(self, model: Model) -> None:
        self._model, self._window = model, model.kv_window
        self._session = model.engine().native.session(model.ctx, model.kv, model.kv_window)
        self._vocab_size = model.spec.vocab_size
        self._long_after, self._n_ropes = model.spec.long_after, len(model.spec.ropes)
        self._ids = array("i")
        self._n_since = 0  # tokens that ran since the pages of the embedding were released
        self._lock, self._process = threading.Lock(), os.getpid()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._process != os.getpid():
            if self._lock.locked():
                raise UsageError("another thread ran this session when the process was forked; begin a new one here")
            self._process = os.getpid()
        with self._lock:
            yield

    @property
    def n_tokens(self) -> int:
        return self._session.n_tokens

    def shared(self, token_ids: TokenIds) -> int:
        """How many tokens at the begin of a sequence the session holds already."""
        ids = arguments.token_ids(token_ids, self._vocab_size)
        own = np.array(self._ids[: min(self.n_tokens, ids.size)], np.int32)
        differ = np.flatnonzero(own != ids[: own.size])
        return int(differ[0]) if differ.size else int(own.size)

    @property
    def n_dropped(self) -> int:
        """Tokens that the next one cannot see, since `kv_memory` has no room for them."""
        return max(0, self.n_tokens + 1 - self._window - KV_SINKS) if self._window else 0

    def append(self, token_ids: TokenIds, *, all_logits: bool = False) -> F32Array:
        """Run tokens through the model: logits (1, vocab_size) after the last, or (n_tokens, vocab_size) after each.

        The bits do not depend on how tokens are split over calls. Raises UsageError for no tokens, for more than fit,
        and for an id that is not an integer of the vocabulary; nothing is appended then. Raises ClosedError.
        """
        tokens = arguments.token_ids(token_ids, self._vocab_size)
        if tokens.size == 0:
            raise UsageError("there is no token to append; give at least one")
        with self._exclusive():
            return self._append(tokens, all_logits=all_logits)

    def _append(self, tokens: npt.NDArray[np.int32], *, all_logits: bool) -> F32Array:
        self._model.engine()  # raises before memory is allocated for logits
        if self.n_tokens + tokens.size > self._session.n_positions:
            raise UsageError(
                f"{tokens.size} more tokens do not fit: the session holds {self.n_tokens} of at most "
                f"{self._session.n_positions}; raise ctx or shorten the text"
            )
        out = np.empty((tokens.size if all_logits else 1, self._vocab_size), np.float32)
        before = self.n_tokens
        del self._ids[before:]
        self._ids.frombytes(tokens.tobytes())
        end, start = before + tokens.size, before
        for stop in (*(limit for limit in self._long_after if before < limit < end), end):
            if all_logits or stop == end:  # else the tokens run when the next set of ropes begins
                self._take_ropes(stop, start)
                piece = slice(start - before, stop - before)
                self._run(tokens[piece], out[piece] if all_logits else out)
            start = stop
        return out

    def _take_ropes(self, n_positions: int, n_tokens: int) -> None:
        """The set of ropes for sequences of n_positions; where it changes, the first n_tokens run again."""
        offset = self._model.spec.rope_set(n_positions) * self._n_ropes
        if offset != self._session.rope_offset:
            self._restart(n_tokens, rope_offset=offset)

    def _run(self, tokens: npt.NDArray[np.int32], out: F32Array) -> None:
        # In pieces of at most kernels.PASS_TOKENS, so that an interrupt is seen between them.
        for start in range(0, tokens.size, kernels.PASS_TOKENS):
            piece = tokens[start : start + kernels.PASS_TOKENS]
            last = start + piece.size == tokens.size
            rows = out[start : start + piece.size] if len(out) == tokens.size else out if last else out[:0]
            engine = self._model.engine()
            engine.reach(self.n_tokens + piece.size)
            with kernels.starting_threads():  # again in a fork of the process
                engine.native.forward(self._session, piece, rows)
            self._n_since += piece.size
            if self._n_since >= kernels.PASS_TOKENS:
                self._model.release_embedding()
                self._n_since = 0

    def _restart(self, n_tokens: int, *, rope_offset: int) -> None:
        """Run the first n_tokens again."""
        self._session.truncate(0)
        self._session.rope_offset = rope_offset
        if n_tokens:
            self._run(np.array(self._ids[:n_tokens], np.int32), np.empty((1, self._vocab_size), np.float32))

    def truncate(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens`.

        Dropping the last few, such as drafts, takes no time. A deeper cut may run the remaining tokens again. Raises
        UsageError, ClosedError.
        """
        with self._exclusive():
            self._model.engine()
            self._truncate(count(n_tokens, "n_tokens", high=self.n_tokens, what="what the session holds"))

    def _truncate(self, n_tokens: int) -> None:
        offset = self._model.spec.rope_set(n_tokens) * self._n_ropes
        if offset != self._session.rope_offset:
            self._restart(n_tokens, rope_offset=offset)
        elif not self._session.truncate(n_tokens):
            self._restart(n_tokens, rope_offset=self._session.rope_offset)
