"""QuantScheme: how one tensor is coded in a `.w4` file (w4-codes 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from w4conv.errors import UsageError

TILE_ROWS: Final = 16  # rows stored together
DWORD_BITS: Final = 32  # one row's share of a line
LINE_BYTES: Final = TILE_ROWS * DWORD_BITS // 8  # 64

BITS: Final = {
    "int4": 4, "int4z": 4, "int4o": 4, "nf4": 4, "fp4": 4, "e2m1": 4, "int8": 8, "f16": 16, "bf16": 16, "f32": 32,
}  # fmt: skip
KEPT_ONLY: Final = ("int4o", "e2m1")  # hold what other formats have; no values are rounded to them
FLOAT_KINDS: Final = ("f16", "bf16", "f32")
GROUP_SIZES: Final = (32, 64, 128, 256, 0)  # 0: the whole row is one group


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Coding of one tensor.

    kind: "int4" (symmetric), "int4z" (with zero point), "int4o" (with offset), "nf4", "fp4" and "e2m1" (16-entry
        codebook), "int8" (symmetric), "f16", "bf16", "f32" (values kept as they are).
    group_size: consecutive columns of a row that share a scale; 0 means the whole row. 0 for float kinds.
    scale_dtype: "f16" or "f32"; "" for float kinds.
    """

    kind: str
    group_size: int = 0
    scale_dtype: str = ""

    def __post_init__(self) -> None:
        if self.kind not in BITS:
            raise UsageError(f"unknown scheme {self.kind!r}; known are {', '.join(BITS)}")
        if self.is_float:
            if self.group_size or self.scale_dtype:
                raise UsageError(f"scheme {self.kind} has no groups and no scales")
            return
        if self.group_size not in GROUP_SIZES:
            raise UsageError(f"group size {self.group_size} is not one of 32, 64, 128, 256, 0 (whole row)")
        if self.scale_dtype not in ("f16", "f32"):
            raise UsageError(f"scale dtype {self.scale_dtype!r} is neither f16 nor f32")

    @property
    def bits(self) -> int:
        """Bits of one code or value, without scales."""
        return BITS[self.kind]

    @property
    def is_float(self) -> bool:
        return self.kind in FLOAT_KINDS

    @property
    def columns_per_dword(self) -> int:
        """Columns of one row held by a dword; columns are padded to a multiple of it."""
        return DWORD_BITS // self.bits

    def n_groups(self, n_columns: int) -> int:
        """Groups of a row of `n_columns`; the last one may be shorter (w4-codes 3.3)."""
        if self.is_float or n_columns == 0:
            return 0
        return -(-n_columns // self.group_size) if self.group_size else 1

    def __str__(self) -> str:
        if self.is_float:
            return self.kind
        return f"{self.kind}/{f'g{self.group_size}' if self.group_size else 'row'}"


F16: Final = QuantScheme("f16")
BF16: Final = QuantScheme("bf16")
F32: Final = QuantScheme("f32")


def int4(group_size: int = 128) -> QuantScheme:
    """Symmetric 4-bit with FP16 scales."""
    return QuantScheme("int4", group_size, "f16")


def int8(group_size: int = 128) -> QuantScheme:
    """Symmetric 8-bit with FP16 scales."""
    return QuantScheme("int8", group_size, "f16")
