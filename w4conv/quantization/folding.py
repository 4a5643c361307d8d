"""Channels scaled by powers of two; the factors are folded into the operations before. The model computes the same.

A linear layer with inputs x_c / s_c and weights W_jc s_c has the outputs that it has with x_c and W_jc. Whatever
produces x takes the factor 1 / s_c:

    qkv, gate_up   the weight of the norm before
    o              the rows of v, and their bias; query heads that share keys and values share s
    down           the rows of up, and their bias: their output is multiplied with the activation of the gate

s = 2^e changes exponents only: no weight is rounded, and every product and sum keeps its bits. Rounding to 4 bits then
costs channels with a larger s less (Lin et al. 2023, AWQ; there s is any number).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from w4conv import codes
from w4conv.errors import InputError
from w4conv.models import spec_of
from w4conv.models.activations import ACTIVATIONS
from w4conv.models.spec import READS, ModelSpec, TensorSpec
from w4conv.sources.base import CodedRows, Source, SourceTensor

Exponents = npt.NDArray[np.int8]

HOOKS: Final = ("qkv", "o", "gate_up", "down")
MAX_EXPONENT: Final = 12
_ONE: Final = "m"  # in a record: e = 0; "n" is 1, "l" is -1
# What produces the rows at a hook.
_NORMS: Final = {"qkv": "attention_norm", "gate_up": "mlp_norm"}
_ROWS: Final = {"v_proj": "o", "qkv_proj": "o", "up_proj": "down", "gate_up_proj": "down"}


def can_fold(spec: ModelSpec, hook: str) -> bool:
    """Whether factors fold exactly into what produces the rows of `hook`."""
    if hook in _NORMS:
        return _NORMS[hook] in spec.norms and spec.norm_offset == 0
    return hook == "o" or (spec.experts is None and ACTIVATIONS[spec.activation].linear_in_up)


def given_to(part: str) -> str:
    """The hook that the outputs of a matrix reach; "" for none."""
    return _ROWS.get(part, "")


def n_factors(spec: ModelSpec, hook: str) -> int:
    """Number of factors of a hook."""
    return {
        "qkv": spec.hidden_size,
        "o": spec.n_kv_heads * spec.head_dim,
        "gate_up": spec.hidden_size,
        "down": spec.intermediate_size,
    }[hook]


def spread(spec: ModelSpec, hook: str, per_factor: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Numbers of factors, repeated for each column of the matrices that read `hook`."""
    if hook != "o":
        return per_factor
    heads = per_factor.reshape(spec.n_kv_heads, spec.head_dim)
    return np.repeat(heads, spec.n_heads // spec.n_kv_heads, axis=0).ravel()


@dataclass(frozen=True, slots=True)
class Folding:
    """exponents: (layer, hook) -> log2 s of each of its factors; absent hooks have s = 1."""

    spec: ModelSpec
    exponents: Mapping[tuple[int, str], Exponents]

    def record(self) -> dict[str, str]:
        """For the provenance of a container: "layer.hook" -> one letter for each factor."""
        return {
            f"{layer}.{hook}": (e.astype(np.int16) + ord(_ONE)).astype(np.uint8).tobytes().decode("ascii")
            for (layer, hook), e in self.exponents.items()
        }

    @classmethod
    def parse(cls, record: object, spec: ModelSpec, where: str) -> Folding:
        """Inverse of `record`. Raises InputError."""
        known = {f"{i}.{hook}": (i, hook) for i in range(spec.n_layers) for hook in HOOKS if can_fold(spec, hook)}
        found: dict[tuple[int, str], Exponents] = {}
        for key, letters in record.items() if isinstance(record, dict) else [("", "")]:
            if key not in known:
                raise InputError(f"{where}: its record of folded channels names {key[:40]!r}, which takes no factors")
            e = np.frombuffer(str(letters).encode(), np.uint8).astype(np.int16) - ord(_ONE)
            if len(e) != n_factors(spec, known[key][1]) or (abs(e) > MAX_EXPONENT).any():
                raise InputError(f"{where}: its record of folded channels does not fit {spec.architecture} at {key}")
            found[known[key]] = e.astype(np.int8)
        return cls(spec, found)

    def of(self, t: TensorSpec) -> tuple[Exponents | None, Exponents | None]:
        """Exponents by which the rows and the columns of a tensor are scaled; of a vector, its values as rows."""
        if t.layer is None:
            return None, None
        part = t.part.removesuffix(".bias")
        columns = self.exponents.get((t.layer, READS.get(t.part, "")))
        before = next((hook for hook, norm in _NORMS.items() if norm == part), given_to(part))
        rows = self.exponents.get((t.layer, before))
        if rows is not None:  # of a fused matrix they are the last
            rows = np.concatenate([np.zeros(t.shape[0] - len(rows), np.int8), rows])
        return (
            None if rows is None else np.asarray(-rows, np.int8),
            None if columns is None else spread(self.spec, READS[t.part], columns),
        )


class FoldedSource(Source):
    """A source with a folding: its matrices scaled are read in BF16 or F32, norms and biases in the type they have."""

    def __init__(self, source: Source, folding: Folding) -> None:
        self._source = source
        exponents = {t.name: folding.of(t) for t in folding.spec.tensors()}
        self._scaled = {name: e for name, e in exponents.items() if any(x is not None for x in e)}
        self.kind, self.path, self.files, self.blobs = source.kind, source.path, source.files, source.blobs
        self.notes, self.warnings, self.gptq_zero15 = source.notes, source.warnings, source.gptq_zero15
        self.tensors = {name: self._described(t) for name, t in source.tensors.items()}

    def _described(self, t: SourceTensor) -> SourceTensor:
        if t.name not in self._scaled:
            return t
        return replace(t, coding=None, dtype="F32" if t.dtype == "F16" and len(t.shape) > 1 else t.dtype)

    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[np.generic]:
        values = self._source.read(name, rows)
        if name not in self._scaled:
            return values
        of_rows, of_columns = self._scaled[name]
        e = np.zeros((1,) * values.ndim, np.int32)
        if of_rows is not None:
            of_rows = of_rows[rows or slice(None)]
            e = e + (of_rows if values.ndim == 1 else of_rows[:, None])
        if of_columns is not None:
            e = e + of_columns
        scaled, exact = scale(values, self._source.tensors[name].dtype, self.tensors[name].dtype, e)
        if not exact.all():
            raise InputError(f"{self.path}: {name}: a value is so small that scaling it by a power of two rounds it")
        return scaled

    def read_coded(self, name: str, rows: slice) -> CodedRows:
        return self._source.read_coded(name, rows)

    def close(self) -> None:
        self._source.close()


def scale(
    values: npt.NDArray[Any], dtype: str, to: str, exponents: npt.NDArray[np.integer[Any]]
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.bool_]]:
    """(values * 2^exponents in the type `to`, which of them are so exactly)."""
    wide = codes.as_f32(values, dtype)
    with np.errstate(over="ignore", under="ignore"):
        scaled = np.ldexp(wide, exponents)
        out = codes.f32_to_bf16(scaled) if to == "BF16" else scaled.astype(np.float16 if to == "F16" else np.float32)
        back = np.ldexp(codes.as_f32(out, to), -exponents)
    return out, (back == wide) | np.isnan(wide)


def folded_as_recorded(
    source: Source, provenance: Mapping[str, Any], blobs: Mapping[str, bytes], where: object
) -> Source:
    """A source as a container reads it that was made from it. Raises InputError."""
    if "folding" not in provenance:
        return source
    try:
        spec = spec_of(blobs)
        return FoldedSource(source, Folding.parse(provenance["folding"], spec, str(where)))
    except BaseException:
        source.close()
        raise
