"""Sampling: how the next token is chosen from logits, stated once (docs/numerics.md 8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, SupportsIndex

import numpy as np

from w4conv import arguments, elementary, kernels
from w4conv.arguments import count, real, shown
from w4conv.arrays import F32Array
from w4conv.errors import UsageError

MAX_LOGPROBS: Final = 100  # alternatives of a token
MAX_CHOICES: Final = 1024
_FLOAT: Final = 3.0e38  # what float32 holds


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The options of a choice. The steps, each on the result of the one before:

    1. `logit_bias` is added to the logits of its tokens; minus infinity rules one out.
    2. Of each token in prompt or answer, a logit above 0 is divided by `repetition_penalty`, any other multiplied by
       it.
    3. Of each token in the answer, `frequency_penalty` times the number of times it is there, and `presence_penalty`,
       are taken off.
    4. At `temperature` 0 the largest logit is chosen (of equal ones the first). Else the logits are divided by it.
    5. The `top_k` largest remain (0: all).
    6. Of these, the fewest most probable whose share reaches `top_p` (1: all).
    7. Of these, those at least `min_p` times as probable as the most probable (0: all).
    8. One of them is drawn, with a random number of (`seed`, number of the choice, position in the sequence).

    That is the order of transformers. Of equals the lower token id counts as the larger.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises UsageError for values out of range, and for filters at temperature 0, where they have no effect."""
        put = object.__setattr__  # numbers of numpy and the like become Python's
        put(self, "temperature", _real(self.temperature, "temperature", "0 (greedy), or from 1e-30 to 1e30", _is_warm))
        put(self, "top_k", count(self.top_k, "top-k"))
        put(self, "top_p", _real(self.top_p, "top-p", "above 0 and at most 1 (off)", lambda x: 0 < x <= 1))
        put(self, "min_p", _real(self.min_p, "min-p", "0 (off) to 1", lambda x: 0 <= x <= 1))
        put(self, "seed", count(self.seed, "seed", high=(1 << 128) - 1))
        put(self, "repetition_penalty", _real(
            self.repetition_penalty, "repetition-penalty", "from 1e-30 to 1e30; 1 is off", lambda x: 1e-30 <= x <= 1e30
        ))  # fmt: skip
        for name in ("presence_penalty", "frequency_penalty"):
            put(self, name, _real(getattr(self, name), name.replace("_", "-"), "a number; 0 is off", _fits))
        put(self, "logit_bias", _bias(self.logit_bias))
        if self.temperature == 0 and (self.top_k or self.top_p < 1 or self.min_p):
            raise UsageError("top-k, top-p and min-p have no effect at temperature 0 (greedy); set a temperature too")


class Sampler:
    """The choices of one sequence, token after token. Called with logits (vocab_size,) float32, it returns a token id
    and counts it as the next of the sequence.

    prompt_ids: the tokens before. choice: the number of the sequence among several of one prompt.
    Raises InputError where a logit is not a number or +infinity, or where none is finite.
    """

    def __init__(self, sampling: Sampling, *, prompt_ids: Iterable[SupportsIndex] = (), choice: int = 0) -> None:
        s = sampling
        self._chooser = kernels.new_chooser(
            temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, seed=s.seed,
            choice=count(choice, "choice"), repetition=s.repetition_penalty, presence=s.presence_penalty,
            frequency=s.frequency_penalty, bias=s.logit_bias,
        )  # fmt: skip
        self._chooser.see(arguments.token_ids(prompt_ids, 2**31))

    def __call__(self, logits: F32Array) -> int:
        return int(kernels.choose(logits[None], [self._chooser], threads=1)[0])


def choose(logits: F32Array, samplers: Iterable[Sampler], *, threads: int | None = None) -> list[int]:
    """One token for each row of logits (n, vocab_size), by its own sampler: as n calls, side by side."""
    return [int(token) for token in kernels.choose(logits, [s._chooser for s in samplers], threads=threads)]


@dataclass(frozen=True)
class TokenLogprob:
    """The natural logarithm of the probability of a token, in the distribution of the model's own logits: before bias,
    penalties, temperature and filters. top: (token id, logprob) of the most probable tokens, falling."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprob(logits: F32Array, token: int, *, n_top: int = 0) -> TokenLogprob:
    """Of a token, by logits (vocab_size,) float32. Raises InputError as Sampler does."""
    tops, _, sums = kernels.log_sums(logits[None], threads=1)
    norm = log_norm(float(tops[0]), int(sums[0]))
    alternatives = kernels.largest(logits, n_top) if n_top else ()
    return TokenLogprob(
        token, float(logits[token]) - norm, tuple((int(i), float(logits[i]) - norm) for i in alternatives)
    )


def log_norm(top: float, total: int) -> float:
    """ln of the sum of exp(logits), of what `kernels.log_sums` gives for a row."""
    return top + elementary.log(total / kernels.WHOLE_WEIGHT)


def token_logprobs(logits: F32Array, tokens: Iterable[int], *, threads: int | None = None) -> list[tuple[float, bool]]:
    """Of token i by row i of logits (n, vocab_size): its logprob, and whether it is the first most probable one."""
    tops, best, sums = kernels.log_sums(logits, threads=threads)
    rows = zip(tokens, logits, tops.tolist(), best.tolist(), sums.tolist(), strict=True)
    return [(float(row[token]) - log_norm(top, total), token == first) for token, row, top, first, total in rows]


def _is_warm(x: float) -> bool:
    return x == 0 or 1e-30 <= x <= 1e30


def _fits(x: float) -> bool:
    return abs(x) <= _FLOAT


def _bias(values: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise UsageError(f"logit-bias is {shown(values)}; it must map token ids to numbers")
    out: dict[int, float] = {}
    for token, value in values.items():
        number = -math.inf if _is_minus_infinity(value) else real(value, "logit-bias", "a number or -inf")
        if number > -math.inf and not _fits(number):
            raise UsageError(f"logit-bias is {shown(value)}; it must be a number or -inf")
        out[count(token, "token id of logit-bias", high=2**31 - 1)] = number
    return out


def _is_minus_infinity(value: object) -> bool:
    return isinstance(value, float | np.floating) and value == -math.inf


def _real(value: float, name: str, expected: str, holds: Callable[[float], bool]) -> float:
    number = real(value, name, expected)
    if not holds(number):
        raise UsageError(f"{name} is {shown(value)}; it must be {expected}")
    return number
