"""The native kernels, with numpy in and out. Beside runtime/engine.py the only importer of the native module."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from w4conv import _native, codes
from w4conv.arguments import MAX_THREADS, count
from w4conv.errors import ResourceError, UsageError
from w4conv.scheme import F32, KEPT_ONLY, TILE_ROWS, QuantScheme

Array = npt.NDArray[np.generic]
F32Array = npt.NDArray[np.float32]
PASS_TOKENS: int = _native.MAX_TOKENS  # tokens that pass through the engine together, at most
VALUE_DTYPES = {"F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4")}


class BadValueError(ValueError):
    """A value that cannot be coded. `reason` says what, `row` and `column` where in the block."""

    def __init__(self, reason: str, row: int, column: int) -> None:
        super().__init__(f"{reason} at row {row}, column {column}")
        self.reason, self.row, self.column = reason, row, column


class PackedRows(NamedTuple):
    """codes: (n_tiles, n_lines, 16) uint32; scales: (n_tiles, n_groups, 16) float16; zero_points: uint8 of the same
    shape for int4z, else None.

    n_underflowed: groups of nonzero values whose scale is zero in FP16, so that all their levels are zero.
    """

    codes: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.float16]
    zero_points: npt.NDArray[np.uint8] | None
    n_underflowed: int

    def parts(self) -> dict[str, Array]:
        """By the names of w4-codes 4, in their order."""
        parts: dict[str, Array] = {"codes": self.codes, "scales": self.scales}
        return parts if self.zero_points is None else parts | {"zero_points": self.zero_points}


def quantize_rtn(values: Array, dtype: str, scheme: QuantScheme, *, threads: int | None = None) -> PackedRows:
    """The nearest codes of (n_rows, n_columns) values, bit for bit `quantization.reference`.

    values: float16 for dtype "F16", uint16 for "BF16" (its bits), float32 for "F32". Blocks of a whole number of tiles
    (16 rows) may be coded one after another and concatenated. Raises BadValueError.
    """
    if scheme.is_float or scheme.kind in KEPT_ONLY or scheme.scale_dtype != "f16":
        raise UsageError(f"no native quantizer for scheme {scheme}")
    return _convert(values, dtype, scheme, threads)


def pack_float(values: Array, dtype: str, scheme: QuantScheme, *, threads: int | None = None) -> npt.NDArray[np.uint32]:
    """Values as tiled f16, bf16 or f32 lines (n_tiles, n_lines, 16), rounded half to even where the type narrows.

    Raises BadValueError for NaN, infinity, and values that the new type cannot hold.
    """
    return _convert(values, dtype, scheme, threads).codes


def _convert(values: Array, dtype: str, scheme: QuantScheme, threads: int | None) -> PackedRows:
    n_rows, n_columns = values.shape
    if values.dtype != VALUE_DTYPES[dtype]:
        raise TypeError(f"values of dtype {dtype} are {VALUE_DTYPES[dtype]} arrays, not {values.dtype}")
    n_tiles = codes.n_tiles(n_rows)
    n_lines = -(-n_columns // scheme.columns_per_dword)
    lines = np.empty((n_tiles, n_lines, TILE_ROWS), np.uint32)
    scales = np.empty((n_tiles, scheme.n_groups(n_columns), TILE_ROWS), np.float16)
    zero_points = np.empty(scales.shape, np.uint8) if scheme.kind == "int4z" else None
    if lines.size == 0:
        return PackedRows(lines, scales, zero_points, 0)
    reason, row, column, n_underflowed = _native.convert(
        _pool(threads),
        as_bytes(values),
        dtype,
        n_rows,
        n_columns,
        scheme.kind,
        scheme.group_size,
        as_bytes(lines),
        as_bytes(scales),
        np.empty(0, np.uint8) if zero_points is None else as_bytes(zero_points),
    )
    if reason:
        raise BadValueError(reason, row, column)
    return PackedRows(lines, scales, zero_points, n_underflowed)


def matrix_parts(scheme: QuantScheme, shape: tuple[int, int], parts: Mapping[str, Array]) -> _native.MatrixParts:
    """A coded matrix of shape (n_rows, n_columns) as the native code takes it.

    parts: by the names of w4-codes 4. Their memory has to stay for as long as the result is used.
    """
    empty = np.empty(0, np.uint8)

    def part(kind: str) -> npt.NDArray[np.uint8]:
        return as_bytes(parts[kind]) if kind in parts else empty

    codes_ = part("values" if scheme.is_float else "codes")
    per_group = map(part, ("scales", "zero_points", "offsets", "super_scales", "super_offsets"))
    return _native.MatrixParts(scheme.kind, *shape, scheme.group_size, scheme.scale_dtype, codes_, *per_group)


def matmul(
    scheme: QuantScheme,
    shape: tuple[int, int],
    parts: Mapping[str, Array],
    x: npt.NDArray[np.float32],
    *,
    threads: int | None = 1,
    activation_bits: int = 16,
) -> npt.NDArray[np.float32]:
    """x (n_tokens, n_columns) times a coded matrix of shape (n_rows, n_columns): (n_tokens, n_rows) float32.

    Integer schemes quantize x to integers of 16 or 8 bits as docs/numerics.md says; the others take it as it is. The
    same bits on every tier, for any threads and n_tokens.
    """
    n_rows, n_columns = shape
    padded = np.zeros((len(x), -(-n_columns // TILE_ROWS) * TILE_ROWS), np.float32)
    padded[:, :n_columns] = x
    width = codes.n_tiles(n_rows) * TILE_ROWS
    store = np.empty(len(x) * width + 16, np.float32)  # rows begin at a cache line, as the engine's do
    y = store[-(store.ctypes.data // 4) % 16 :][: len(x) * width].reshape(len(x), width)
    _native.matmul(_pool(threads), matrix_parts(scheme, shape, parts), padded, y, activation_bits)
    return y[:, :n_rows]


def dequantize(
    scheme: QuantScheme, shape: tuple[int, int], parts: Mapping[str, Array], *, threads: int | None = None
) -> F32Array:
    """The values of a coded matrix, bit for bit `codes.dequantize`."""
    out = np.empty(shape, np.float32)
    if out.size:
        _native.dequantize(_pool(threads), matrix_parts(scheme, shape, parts), out)
    return out


class Difference(NamedTuple):
    """Of y from x, with e = y - x. sums: float64 (3, n_rows, n_groups), of each row and group x * x, e * e, x * e.

    largest: |e|, NaN where there is one. equal: every x == y. remade: whether round-to-nearest, or packing, makes the
    very bytes of the values; False where that was not asked.
    """

    sums: npt.NDArray[np.float64]
    largest: float
    equal: bool
    remade: bool = False


def compare(x: F32Array, y: F32Array, group_size: int, *, threads: int | None = None) -> Difference:
    """x, y: (n_rows, n_columns), with one column or more. The order of the sums is fixed: w4conv/kernels.h."""
    sums = np.empty((3, len(x), -(-x.shape[1] // group_size)))
    x, y = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(y, np.float32)
    return Difference(sums, *_native.compare(_pool(threads), x, y, group_size, sums))


def compare_with_source(
    values: Array,
    dtype: str,
    scheme: QuantScheme,
    parts: Mapping[str, Array],
    group_size: int,
    *,
    remake: bool,
    threads: int | None = None,
) -> Difference:
    """A coded matrix, y, and the values that it was made of, x (n_rows, n_columns), as `quantize_rtn` takes them.

    The same as `compare` with `dequantize`, and as `quantize_rtn` or `pack_float` for `remade`, in one pass over
    memory. remake: only for schemes that these make.
    """
    n_rows, n_columns = values.shape
    if not values.size:
        return Difference(np.empty((3, n_rows, 0)), 0.0, equal=True, remade=remake)
    sums = np.empty((3, n_rows, -(-n_columns // group_size)))
    found = _native.compare_with_source(
        _pool(threads), as_bytes(values), dtype,
        matrix_parts(scheme, (n_rows, n_columns), parts), remake, group_size, sums,
    )  # fmt: skip
    return Difference(sums, *found)


def read(data: npt.NDArray[np.uint8], *, threads: int) -> int:
    """Read whole 64-byte lines of `data` and nothing else; returns how many bytes that was."""
    lines = data[: data.size // 64 * 64]
    _native.read(_pool(threads), lines)
    return lines.size


def multiply_registers(*, operands: str, threads: int) -> int:
    """Dot products of the tier in use from registers, nothing else; returns how many multiplications that was.

    operands: of the activations, "int16", "int8" or "float".
    """
    return _native.multiply_registers(_pool(threads), operands)


def product(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], *, threads: int | None = None) -> F32Array:
    """a (m, k) times the transpose of b (n, k): (m, n) float32, the same bits on every tier and for any threads."""
    lines = pack_float(np.ascontiguousarray(b), "F32", F32, threads=threads)
    return matmul(F32, (b.shape[0], b.shape[1]), {"values": lines}, a, threads=threads)


def add_products(a: F32Array, b: F32Array, out: F32Array, *, upper: bool = False, threads: int | None = None) -> None:
    """Add a^T b, a (n_k, m), b (n_k, n), to out (m, n), bit for bit `quantization.reference_gptq.products`.

    upper: of a square `out`, only what lies on and above the diagonal, and some of what lies below.
    """
    _native.products(_pool(threads), a, b, upper, out)


def factor(
    h: F32Array, columns: npt.NDArray[np.int64], diagonal: F32Array, *, threads: int | None = None
) -> tuple[F32Array, F32Array] | int:
    """Of some rows and columns of the symmetric h, with another diagonal, U^T D U: U (n, n), its transpose below the
    diagonal of ones, and D (n,). Bit for bit `quantization.reference_gptq.factor`.

    Or the first column whose pivot is not positive.
    """
    n = len(columns)
    unit, pivots = np.empty((n, n), np.float32), np.empty(n, np.float32)
    bad = _native.factor(_pool(threads), h, columns, diagonal, unit, pivots)
    return (unit, pivots) if bad < 0 else bad


def round_with_feedback(
    w: F32Array,
    group: npt.NDArray[np.int32],
    scales: F32Array,
    lows: F32Array,
    factor: F32Array,
    *,
    grid: codes.Grid,
    threads: int | None = None,
) -> npt.NDArray[np.int8]:
    """q (n_tiles, n_columns, 16), bit for bit `quantization.reference_gptq.round_with_feedback`.

    w: (n_tiles, n_columns, 16); group: (n_columns,) whose scale each column has; scales, lows (the lowest integers):
    (n_tiles, n_groups, 16); factor: (n_columns, n_columns), as `factor` gives it.
    """
    q = np.empty(w.shape, np.int8)
    pool = _pool(threads)
    _native.round_with_feedback(pool, w, group, scales, lows, factor, _native_grid(grid), q)
    return q


def solve_rows(x: F32Array, factor: F32Array, pivots: F32Array, *, threads: int | None = None) -> None:
    """x (n_tiles, n_columns, 16) becomes the y of y H = x, bit for bit `quantization.reference_gptq.solve`.

    factor, pivots: of H, as `factor` gives them.
    """
    _native.solve_rows(_pool(threads), x, factor, pivots)


def refine(
    w: F32Array,
    q: npt.NDArray[np.int8],
    scales: npt.NDArray[np.float16],
    lows: F32Array,
    h: F32Array,
    group_size: int,
    *,
    grid: codes.Grid,
    n_rounds: int,
    threads: int | None = None,
) -> None:
    """Make q (n_tiles, n_columns, 16) and scales (n_tiles, n_groups, 16) better for w under h, in place.

    Bit for bit `quantization.reference_gptq.refine`.
    """
    pool = _pool(threads)
    _native.refine(pool, w, group_size, h, _native_grid(grid), n_rounds, scales.view(np.uint16), lows, q)


def search_scales(
    w: F32Array,
    group_size: int,
    factors: F32Array | None,
    pivots: F32Array,
    multipliers: F32Array,
    *,
    grid: codes.Grid,
    threads: int | None = None,
) -> tuple[npt.NDArray[np.float16], F32Array, F32Array]:
    """Scales, lowest integers and their errors (n_tiles, n_groups, 16), bit for bit
    `quantization.reference_gptq.search_scales`.

    w: (n_tiles, n_columns, 16); factors: (n_groups, group_size, group_size) as `factor` gives them, or None; pivots:
    (n_columns,); multipliers: (n_candidates, 2). The matrix of a last group of fewer columns fills the front of its
    place.
    """
    if factors is None:
        factors = np.empty((0, group_size, group_size), np.float32)
    shape = (w.shape[0], -(-w.shape[1] // group_size), TILE_ROWS)
    scales, lows, errors = np.empty(shape, np.uint16), np.empty(shape, np.float32), np.empty(shape, np.float32)
    pool = _pool(threads)
    _native.search_scales(pool, w, group_size, factors, pivots, multipliers, _native_grid(grid), scales, lows, errors)
    return scales.view(np.float16), lows, errors


def _native_grid(grid: codes.Grid) -> _native.Grid:
    return _native.Grid(grid.span, grid.is_shifted, grid.levels)


def as_bytes(a: Array) -> npt.NDArray[np.uint8]:
    """Flat uint8 view of a C-contiguous array (a copy of any other)."""
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)


def thread_count(threads: int | None) -> int:
    """`threads` as given, from 1 to 1024, or as many as suit this process. Raises UsageError."""
    return count(threads, "threads", low=1, high=MAX_THREADS) if threads is not None else default_threads()


def _pool(threads: int | None) -> _native.Pool:
    isa_tier()  # so that a W4CONV_ISA that cannot run is told as such
    return _pool_of(thread_count(threads))


@functools.lru_cache(maxsize=4)
def _pool_of(n_threads: int) -> _native.Pool:
    with starting_threads():
        return _native.Pool(n_threads)


os.register_at_fork(after_in_child=_pool_of.cache_clear)  # threads stay behind in the parent


@contextlib.contextmanager
def starting_threads() -> Iterator[None]:
    """Raises ResourceError where the system starts no more native threads."""
    try:
        yield
    except _native.ThreadStartError as error:
        raise ResourceError(f"{error}. Ask for fewer with --threads, or raise the limit (ulimit -u)") from None


class AllowedCpus(NamedTuple):
    """CPUs that this process may use: by affinity, the physical cores among them, and those that cgroups grant (or
    None)."""

    cpus: int
    cores: int
    quota: float | None

    @property
    def default_threads(self) -> int:
        """One for each core, as the second thread of a core adds no bandwidth; none that would wait for its quota."""
        return max(1, min(self.cores, int(self.quota) if self.quota is not None else self.cores))

    @property
    def most_threads(self) -> int:
        """More would take turns."""
        return min(self.cpus, math.ceil(self.quota) if self.quota is not None else self.cpus)

    def __str__(self) -> str:
        cores = "" if self.cores == self.cpus else f" on {self.cores} cores"
        quota = "no cgroup quota" if self.quota is None else f"a cgroup quota of {self.quota:g}"
        return f"{self.cpus} CPUs{cores} by affinity, {quota}"


@functools.cache
def allowed_cpus() -> AllowedCpus:
    root = Path("/")
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return AllowedCpus(len(cpus), _cores(root, cpus), _cgroup_cpus(root))


def default_threads() -> int:
    """Threads to use unless told: physical cores that this process may run on, limited by the cgroup's CPU quota."""
    return allowed_cpus().default_threads


def _cores(root: Path, cpus: set[int]) -> int:
    """Sets of CPUs that share a core; a CPU of which the system does not tell is a core of its own."""
    found = set()
    for cpu in cpus:
        try:
            found.add((root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            found.add(str(cpu))
    return len(found)


def _cgroup_cpus(root: Path) -> float | None:
    """CPUs that the tightest quota of this process's cgroup and its parents grants, versions 1 and 2; None without."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    grants: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        unified = controllers == ""
        if not unified and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("" if unified else controllers)
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == mount.parent:
                break
            grants += _quota(folder, unified=unified)
    return min(grants, default=None)


def _quota(folder: Path, *, unified: bool) -> list[float]:
    try:
        if unified:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return [int(quota) / int(period)] if quota not in ("max", "-1") and int(period) > 0 else []
    except (OSError, ValueError):
        return []


def isa_tiers() -> tuple[str, ...]:
    """Tiers of this build that this CPU can run, lowest first."""
    return tuple(_native.isa_tiers())


def isa_tier() -> str:
    """The tier in use: the highest, or the one that W4CONV_ISA names. Raises UsageError when that cannot run here."""
    try:
        return _native.isa_tier()
    except ValueError as error:
        raise UsageError(str(error)) from None


def dot_instruction() -> str:
    """The dot product that the tier in use was compiled to, such as "vpdpwssd zmm"."""
    return _native.dot_instruction()


def explain_lost_pages() -> None:
    """From now on a mapped file that is shortened under this process ends it with a message and exit code 3.

    Without it, that is a bare SIGBUS. For programs to call: there is one handler in a process.
    """
    _native.explain_lost_pages()


def build_info() -> str:
    """Compiler and build type of the native module."""
    return _native.BUILD
