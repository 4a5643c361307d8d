"""Types of the native module; w4conv.kernels and w4conv.runtime.engine are its only callers."""

import numpy as np
import numpy.typing as npt

BUILD: str
MAX_TOKENS: int

def isa_tiers() -> list[str]: ...
def isa_tier() -> str: ...
def dot_instruction() -> str: ...
def explain_sigbus() -> None: ...

class Vocabulary:
    def __init__(self, document: bytes) -> None: ...
    def shortened(self, seen: str, kept: set[str], more: str) -> bytes: ...
    def token(self, id: int) -> bytes | None: ...
    def id(self, token: str) -> int | None: ...
    def __len__(self) -> int: ...
    @property
    def n_ids(self) -> int: ...

class ThreadStartError(RuntimeError): ...

class Pool:
    def __init__(self, n_threads: int) -> None: ...

def convert(
    pool: Pool,
    values: npt.NDArray[np.uint8],
    dtype: str,
    n_rows: int,
    n_columns: int,
    kind: str,
    group_size: int,
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint8],
    zero_points: npt.NDArray[np.uint8],
) -> tuple[str, int, int, int]: ...

class MatrixParts:
    def __init__(
        self,
        kind: str,
        n_rows: int,
        n_columns: int,
        group_size: int,
        scale_type: str,
        codes: npt.NDArray[np.uint8],
        scales: npt.NDArray[np.uint8],
        zero_points: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.uint8],
        super_scales: npt.NDArray[np.uint8],
        super_offsets: npt.NDArray[np.uint8],
    ) -> None: ...

def dequantize(pool: Pool, parts: MatrixParts, out: npt.NDArray[np.float32]) -> None: ...
def compare(
    pool: Pool,
    x: npt.NDArray[np.float32],
    y: npt.NDArray[np.float32],
    group_size: int,
    sums: npt.NDArray[np.float64],
) -> tuple[float, bool]: ...
def compare_with_source(
    pool: Pool,
    values: npt.NDArray[np.uint8],
    dtype: str,
    parts: MatrixParts,
    reproduce: bool,
    group_size: int,
    sums: npt.NDArray[np.float64],
) -> tuple[float, bool, bool]: ...
def matmul(
    pool: Pool,
    parts: MatrixParts,
    x: npt.NDArray[np.float32],
    y: npt.NDArray[np.float32],
    activation_bits: int,
) -> None: ...
def read(pool: Pool, data: npt.NDArray[np.uint8]) -> int: ...
def multiply_registers(pool: Pool, operands: str) -> int: ...
def gemm(
    pool: Pool,
    a: npt.NDArray[np.float32],
    b: npt.NDArray[np.float32],
    upper: bool,
    out: npt.NDArray[np.float32],
) -> None: ...
def factor(
    pool: Pool,
    h: npt.NDArray[np.float32],
    columns: npt.NDArray[np.int64],
    diagonal: npt.NDArray[np.float32],
    unit: npt.NDArray[np.float32],
    pivots: npt.NDArray[np.float32],
) -> int: ...

class Grid:
    def __init__(self, span: float, is_asymmetric: bool, levels: npt.NDArray[np.float32]) -> None: ...

def gptq_round(
    pool: Pool,
    w: npt.NDArray[np.float32],
    group: npt.NDArray[np.int32],
    scales: npt.NDArray[np.float32],
    qmins: npt.NDArray[np.float32],
    factor: npt.NDArray[np.float32],
    grid: Grid,
    q: npt.NDArray[np.int8],
) -> None: ...
def solve_rows(
    pool: Pool,
    x: npt.NDArray[np.float32],
    factor: npt.NDArray[np.float32],
    pivots: npt.NDArray[np.float32],
) -> None: ...
def refine(
    pool: Pool,
    w: npt.NDArray[np.float32],
    group_size: int,
    h: npt.NDArray[np.float32],
    grid: Grid,
    n_rounds: int,
    steps: npt.NDArray[np.float32],
    scales: npt.NDArray[np.float32],
    qmins: npt.NDArray[np.float32],
    q: npt.NDArray[np.int8],
) -> None: ...
def search_scales(
    pool: Pool,
    w: npt.NDArray[np.float32],
    group_size: int,
    factors: npt.NDArray[np.float32],
    pivots: npt.NDArray[np.float32],
    multipliers: npt.NDArray[np.float32],
    grid: Grid,
    steps: npt.NDArray[np.float32],
    scales: npt.NDArray[np.float32],
    qmins: npt.NDArray[np.float32],
    errors: npt.NDArray[np.float32],
) -> None: ...

class Session:
    @property
    def n_tokens(self) -> int: ...
    @property
    def n_positions(self) -> int: ...
    rope_offset: int
    def truncate(self, n_tokens: int) -> bool: ...

class ModelConfig:
    vocab_size: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    attention_scale: float
    attention_softcap: float
    embedding_scale: float
    residual_scale: float
    logits_divisor: float
    final_softcap: float
    interleaved: bool
    n_experts_per_token: int
    renormalized: bool
    activation_bits: int
    def set_activation(self, name: str) -> None: ...
    def add_rope(self, frequencies: npt.NDArray[np.float32], n_plain: int, magnitude: float) -> None: ...
    def add_layer(self, rope: int, window: int) -> None: ...

class Model:
    def set_linear(self, layer: int, expert: int, part: str, parts: MatrixParts) -> None: ...
    def set_bias(self, layer: int, expert: int, part: str, values: npt.NDArray[np.float32]) -> None: ...
    def set_norm(self, layer: int, part: str, values: npt.NDArray[np.float32]) -> None: ...
    def set_sinks(self, layer: int, values: npt.NDArray[np.float32]) -> None: ...
    def check_shapes(self) -> None: ...
    def session(self, n_positions: int, kv: str, window: int = 0) -> Session: ...
    def session_nbytes(self, n_positions: int, kv: str, window: int) -> int: ...
    def extend_rope(self, rope: int, frequencies: npt.NDArray[np.float32]) -> None: ...
    def restart_stopwatch(self) -> None: ...
    def part_seconds(self) -> tuple[float, float, float, float]: ...
    def forward(self, session: Session, tokens: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> None: ...
    def finish(self, x: npt.NDArray[np.float32], logits: npt.NDArray[np.float32]) -> None: ...
    def run_layer(
        self,
        session: Session,
        layer: int,
        x: npt.NDArray[np.float32],
        qkv: npt.NDArray[np.float32],
        o: npt.NDArray[np.float32],
        gate_up: npt.NDArray[np.float32],
        down: npt.NDArray[np.float32],
        until: int,
        after_attention: bool,
    ) -> None: ...

def gated(pool: Pool, activation: str, gate: npt.NDArray[np.float32], up: npt.NDArray[np.float32], n: int) -> None: ...
def softmax(x: npt.NDArray[np.float32], n: int) -> None: ...
def new_model(config: ModelConfig, threads: int) -> Model: ...
