"""QuantScheme: how one tensor is coded in a `.w4` file (w4-codes 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from w4conv.errors import UsageError

TILE_ROWS: Final = 16  # rows stored together
DWORD_BITS: Final = 32  # one row's share of a line
LINE_BYTES: Final = TILE_ROWS * DWORD_BITS // 8  # 64

# Codebooks, code 0 first; float32 rounds the thirds of FP4.
NF4: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4_MAGNITUDES: Final = (0.0, 0.0625 / 12, 8 / 12, 12 / 12, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
FP4: Final = (*_FP4_MAGNITUDES, *(-m for m in _FP4_MAGNITUDES))
_E2M1_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # two bits of exponent, one of mantissa
E2M1: Final = (*_E2M1_MAGNITUDES, *(-m for m in _E2M1_MAGNITUDES))
IQ4NL: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
NL3: Final = (-127, -72, -40, -13, 11, 34, 64, 103)
TOP_SCALE: Final = 31  # of a scale in 6 bits


@dataclass(frozen=True, slots=True)
class Kind:
    """What is so of all schemes of one kind: the one registration of a scheme (docs/contributing.md, Adding things).

    bits: of one code or value, without scales. levels: of a codebook, code 0 first; else a code is its own level, less
    centre. pad: the code of padding. is_float: values are kept as they are, without groups and scales.
    has_zero_points, has_offsets: a number for each group that is taken from its codes, or added to its values.
    shifts: one of them is added to the levels of a group; which one lies in the byte of the scale.
    takes_integers: products take the activations as integers, of the bits asked for. is_rounded_to: values may be
    rounded to it; else it holds what other formats have. is_calibrated: methods other than rtn know it. minor: the
    first minor version of the container that has it.
    """

    name: str
    bits: int
    levels: tuple[float, ...] = ()
    centre: int = 0
    pad: int = 0
    shifts: tuple[int, ...] = ()
    is_float: bool = False
    has_zero_points: bool = False
    has_offsets: bool = False
    takes_integers: bool = False
    is_rounded_to: bool = True
    is_calibrated: bool = False
    minor: int = 0

    @property
    def has_shifts(self) -> bool:
        return len(self.shifts) > 0


_ALL: Final = (
    Kind("int4", 4, centre=8, pad=8, takes_integers=True, is_calibrated=True),
    Kind("int4z", 4, pad=8, has_zero_points=True, takes_integers=True, is_calibrated=True),
    Kind("int4o", 4, has_offsets=True, takes_integers=True, is_rounded_to=False),
    Kind("nf4", 4, levels=NF4, pad=NF4.index(0.0), is_calibrated=True),
    Kind("fp4", 4, levels=FP4, is_calibrated=True),
    Kind("e2m1", 4, levels=E2M1, takes_integers=True, is_rounded_to=False),
    Kind("iq4nl", 4, levels=IQ4NL, takes_integers=True, is_rounded_to=False, minor=1),
    Kind("nl3", 3, levels=NL3, shifts=(-18, -6, 6, 18), takes_integers=True, is_calibrated=True, minor=1),
    Kind("nl4", 4, levels=IQ4NL, shifts=(-12, -4, 4, 12), takes_integers=True, is_calibrated=True, minor=1),
    Kind("int8", 8, takes_integers=True, is_calibrated=True),
    Kind("int8o", 8, has_offsets=True, takes_integers=True, is_rounded_to=False, minor=1),
    Kind("f16", 16, is_float=True),
    Kind("bf16", 16, is_float=True),
    Kind("f32", 32, is_float=True),
)
KINDS: Final[Mapping[str, Kind]] = {kind.name: kind for kind in _ALL}
FLOAT_KINDS: Final = tuple(kind.name for kind in _ALL if kind.is_float)

GROUP_SIZES: Final = (16, 32, 64, 128, 256, 0)  # 0: the whole row is one group
DEFAULT_GROUP_SIZE: Final = 128
GROUP_WORDS: Final = tuple("row" if size == 0 else str(size) for size in GROUP_SIZES)  # as a user says them
SCALE_DTYPES: Final = ("f16", "f32", "i8", "s6")
SUPER_COLUMNS: Final = 256  # that share a super-scale where scales are "i8"


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Coding of one tensor.

    kind: "int4" (symmetric), "int4z" (with zero point), "int4o" (with offset), "nf4", "fp4" and "e2m1" (16-entry
        codebook), "iq4nl" (the same, of integers), "nl4" (these, with a shift for each group), "nl3" (the same with 8
        entries), "int8" (symmetric), "int8o" (with offset), "f16", "bf16", "f32" (values kept as they are).
    group_size: consecutive columns of a row that share a scale; 0 means the whole row. 0 for float kinds.
    scale_dtype: "f16" or "f32"; "i8" for two levels: a byte for each group, and an FP16 super-scale for 256 columns;
        "s6", of nl4 and nl3: 6 bits for each group, 2 more for its shift, and an FP16 super-scale for the row; "" for
        float kinds.
    """

    kind: str
    group_size: int = 0
    scale_dtype: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"unknown scheme {self.kind!r}; known are {', '.join(KINDS)}")
        if self.is_float:
            if self.group_size or self.scale_dtype:
                raise UsageError(f"scheme {self.kind} has no groups and no scales")
            return
        if self.group_size not in GROUP_SIZES:
            raise UsageError(
                f"group size {self.group_size} is not one of {', '.join(map(str, GROUP_SIZES))} (whole row)"
            )
        if self.scale_dtype not in SCALE_DTYPES:
            raise UsageError(f"scale dtype {self.scale_dtype!r} is not one of {', '.join(SCALE_DTYPES)}")
        if KINDS[self.kind].has_shifts != (self.scale_dtype == "s6"):
            raise UsageError(f"scheme {self.kind} has no scales of dtype {self.scale_dtype}")
        if self.is_two_level and not 0 < self.group_size < SUPER_COLUMNS:
            needy = f"scheme {self.kind}" if self.has_shifts else f"scale dtype {self.scale_dtype}"
            raise UsageError(f"{needy} needs groups of 16 to 128, not {self.group_size or 'row'}")

    @property
    def bits(self) -> int:
        """Bits of one code or value, without scales."""
        return KINDS[self.kind].bits

    @property
    def is_float(self) -> bool:
        return KINDS[self.kind].is_float

    @property
    def has_zero_points(self) -> bool:
        return KINDS[self.kind].has_zero_points

    @property
    def shifts(self) -> tuple[int, ...]:
        return KINDS[self.kind].shifts

    @property
    def has_offsets(self) -> bool:
        return KINDS[self.kind].has_offsets

    @property
    def has_shifts(self) -> bool:
        return KINDS[self.kind].has_shifts

    @property
    def is_two_level(self) -> bool:
        """Whether the scale of a group is its byte times the super-scale above it."""
        return self.scale_dtype in ("i8", "s6")

    @property
    def super_columns(self) -> int:
        """Columns that share a super-scale; 0: the whole row."""
        return 0 if self.has_shifts else SUPER_COLUMNS

    @property
    def minor(self) -> int:
        """The first minor version of the container that has this scheme."""
        return max(KINDS[self.kind].minor, int(self.group_size == 16 or self.is_two_level))

    @property
    def columns_per_run(self) -> int:
        """Columns of one row that fill whole dwords, the fewest; columns are padded to a multiple of it."""
        return math.lcm(DWORD_BITS, self.bits) // self.bits

    def n_lines(self, n_columns: int) -> int:
        """Lines of a tile."""
        return -(-n_columns // self.columns_per_run) * (self.columns_per_run * self.bits // DWORD_BITS)

    def n_groups(self, n_columns: int) -> int:
        """Groups of a row of `n_columns`; the last one may be shorter (w4-codes 3.3)."""
        if self.is_float or n_columns == 0:
            return 0
        return -(-n_columns // self.group_size) if self.group_size else 1

    def __str__(self) -> str:
        if self.is_float:
            return self.kind
        two = "/i8" if self.scale_dtype == "i8" else ""
        return f"{self.kind}/{f'g{self.group_size}' if self.group_size else 'row'}{two}"


def scheme_of(kind: str, group_size: int) -> QuantScheme:
    """What values are rounded to: with scales of 6 bits and shifts where the kind has them, else with FP16 scales."""
    if KINDS[kind].is_float:
        return QuantScheme(kind)
    return QuantScheme(kind, group_size, "s6" if KINDS[kind].has_shifts else "f16")


F16: Final = QuantScheme("f16")
BF16: Final = QuantScheme("bf16")
F32: Final = QuantScheme("f32")


def int4(group_size: int = 128) -> QuantScheme:
    """Symmetric 4-bit with FP16 scales."""
    return QuantScheme("int4", group_size, "f16")


def int8(group_size: int = 128) -> QuantScheme:
    """Symmetric 8-bit with FP16 scales."""
    return QuantScheme("int8", group_size, "f16")


# What a user says of linear weights, and what it means for them, and for embedding and head unless told otherwise.
SCHEME_WORDS: Final = {
    "w4a16": ("int4", "int8"),
    "int4z": ("int4z", "int8"),
    "nl4": ("nl4", "nl4"),
    "nl3": ("nl3", "nl4"),
    "nf4": ("nf4", "int8"),
    "fp4": ("fp4", "int8"),
    "w8a16": ("int8", "int8"),
    "f16": ("f16", "f16"),
    "bf16": ("bf16", "bf16"),
    "f32": ("f32", "f32"),
    "keep": ("keep", "keep"),
}
TENSOR_WORDS: Final = (*(kind.name for kind in _ALL if kind.is_rounded_to), "keep")  # what one tensor can be told to be
