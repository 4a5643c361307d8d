"""QuantScheme: how one tensor is coded in a `.w4` file (w4-codes 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from w4conv.errors import UsageError

TILE_ROWS: Final = 16  # rows stored together
DWORD_BITS: Final = 32  # one row's share of a line
LINE_BYTES: Final = TILE_ROWS * DWORD_BITS // 8  # 64

BITS: Final = {
    "int4": 4, "int4z": 4, "int4o": 4, "nf4": 4, "fp4": 4, "e2m1": 4, "iq4nl": 4, "int8": 8, "int8o": 8,
    "f16": 16, "bf16": 16, "f32": 32,
}  # fmt: skip
KEPT_ONLY: Final = ("int4o", "e2m1", "iq4nl", "int8o")  # hold what other formats have; no values are rounded to them
INTEGER_KINDS: Final = (
    "int4",
    "int4z",
    "int4o",
    "e2m1",
    "iq4nl",
    "int8",
    "int8o",
)  # products take activations as integers
WITH_OFFSETS: Final = ("int4o", "int8o")
FLOAT_KINDS: Final = ("f16", "bf16", "f32")
GROUP_SIZES: Final = (32, 64, 128, 256, 0)  # that values are rounded in; 0: the whole row is one group
HELD_GROUP_SIZES: Final = (16, *GROUP_SIZES)
SCALE_DTYPES: Final = ("f16", "f32", "i8")
SUPER_COLUMNS: Final = 256  # that share a super-scale


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Coding of one tensor.

    kind: "int4" (symmetric), "int4z" (with zero point), "int4o" (with offset), "nf4", "fp4" and "e2m1" (16-entry
        codebook), "iq4nl" (the same, of integers), "int8" (symmetric), "int8o" (with offset), "f16", "bf16", "f32"
        (values kept as they are).
    group_size: consecutive columns of a row that share a scale; 0 means the whole row. 0 for float kinds.
    scale_dtype: "f16" or "f32"; "i8" for two levels: a byte for each group, and an FP16 super-scale for 256 columns; ""
        for float kinds.
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
        if self.group_size not in HELD_GROUP_SIZES:
            raise UsageError(f"group size {self.group_size} is not one of 16, 32, 64, 128, 256, 0 (whole row)")
        if self.scale_dtype not in SCALE_DTYPES:
            raise UsageError(f"scale dtype {self.scale_dtype!r} is not one of {', '.join(SCALE_DTYPES)}")
        if self.is_two_level and not 0 < self.group_size < SUPER_COLUMNS:
            raise UsageError(f"scale dtype i8 needs groups of 16 to 128, not {self.group_size}")

    @property
    def bits(self) -> int:
        """Bits of one code or value, without scales."""
        return BITS[self.kind]

    @property
    def is_float(self) -> bool:
        return self.kind in FLOAT_KINDS

    @property
    def has_offsets(self) -> bool:
        return self.kind in WITH_OFFSETS

    @property
    def is_two_level(self) -> bool:
        """Whether the scale of a group is its byte times the super-scale above it."""
        return self.scale_dtype == "i8"

    @property
    def minor(self) -> int:
        """The first minor version of the container that has this scheme."""
        return int(self.group_size == 16 or self.is_two_level or self.kind in ("iq4nl", "int8o"))

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
        two = "/i8" if self.is_two_level else ""
        return f"{self.kind}/{f'g{self.group_size}' if self.group_size else 'row'}{two}"


F16: Final = QuantScheme("f16")
BF16: Final = QuantScheme("bf16")
F32: Final = QuantScheme("f32")


def int4(group_size: int = 128) -> QuantScheme:
    """Symmetric 4-bit with FP16 scales."""
    return QuantScheme("int4", group_size, "f16")


def int8(group_size: int = 128) -> QuantScheme:
    """Symmetric 8-bit with FP16 scales."""
    return QuantScheme("int8", group_size, "f16")
