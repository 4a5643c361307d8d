"""Rarer layouts: FP8 scales, compressed-tensors per tensor and in blocks, MLX settings of single layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import same
from test_sources_packed import RNG, Q, mlx, values_of, write

from w4conv.errors import InputError
from w4conv.sources import open_source

torch = pytest.importorskip("torch", reason="torch is the oracle; install the oracle dependency group")
quantization = pytest.importorskip("compressed_tensors.quantization", reason="install the oracle dependency group")


def fp8_codes(shape: tuple[int, ...], seed: int) -> Any:
    return RNG(seed).integers(0, 126, shape).astype(np.uint8)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E8M0"])
@pytest.mark.parametrize("kind", ["scalar", "one", "one by one", "blocks"])
def test_fp8(tmp_path: Path, kind: str, dtype: str) -> None:
    shapes = {"scalar": (), "one": (1,), "one by one": (1, 1)}
    exponents: dict[str, Any] = {}
    stored_codes: dict[str, Any] = {}

    def encode(module: str, array: Any, seed: int) -> Any:
        shape = shapes.get(kind, (-(-array.shape[0] // 32), -(-array.shape[1] // 32)))
        e = exponents[module] = RNG(seed).integers(120, 130, shape)
        stored = {"F32": 2.0 ** (e - 127), "BF16": e.astype(np.uint16) << 7, "F8_E8M0": e.astype(np.uint8)}[dtype]
        number = np.asarray(stored, {"F32": np.float32, "BF16": np.uint16, "F8_E8M0": np.uint8}[dtype])
        codes = stored_codes[module] = fp8_codes(array.shape, seed)
        return {f"{module}.weight": ("F8_E4M3", codes), f"{module}.weight_scale_inv": (dtype, number)}

    settings = {"quant_method": "fp8", "weight_block_size": [32, 32] if kind == "blocks" else None}
    found = values_of(write(tmp_path / "m", settings, encode))
    block = (32, 32) if kind == "blocks" else (1 << 10, 1 << 10)
    for module, e in exponents.items():
        value, codes = found[f"{module}.weight"], stored_codes[module]
        spread = np.kron(2.0 ** (e.reshape(-1, e.shape[-1] if e.ndim else 1) - 127), np.ones(block, np.float32))
        plain = torch.tensor(codes).view(torch.float8_e4m3fn).float().numpy()
        assert same(value, (plain * spread[: value.shape[0], : value.shape[1]]).astype(np.float32))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_own_compressor(tmp_path: Path, strategy: str, symmetric: bool) -> None:
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor as Compressor

    size = {"group_size": 32} if strategy == "group" else {}
    weights = quantization.QuantizationArgs(num_bits=4, symmetric=symmetric, strategy=strategy, **size)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    want: dict[str, Any] = {}

    def encode(module: str, array: Any, seed: int) -> Any:
        n_rows, n_columns = array.shape
        shape = {"tensor": (1,), "channel": (n_rows, 1), "group": (n_rows, n_columns // 32)}[strategy]
        rng = RNG(seed)
        zeros = np.zeros(shape) if symmetric else rng.integers(-8, 8, shape)
        state = {
            "weight": torch.tensor(array),
            "weight_scale": torch.tensor(np.abs(rng.standard_normal(shape)).astype(np.float32) / 8 + 0.01),
            "weight_zero_point": torch.tensor(zeros.astype(np.int8)),
        }
        packed = Compressor.compress(state, scheme)
        want[f"{module}.weight"] = Compressor.decompress(packed, scheme)["weight"].float().numpy()
        types = {"torch.int32": "I32", "torch.int64": "I64", "torch.int8": "I8", "torch.float32": "F32"}
        return {f"{module}.{name}": (types[str(t.dtype)], t.numpy()) for name, t in packed.items()}

    group = {"format": "pack-quantized", "targets": ["Linear"], "weights": weights.model_dump(mode="json")}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    found = values_of(write(tmp_path / "m", settings, encode))
    assert all(same(found[name], want[name]) for name in want)
    if not symmetric:
        group["weights"]["symmetric"] = True
        with pytest.raises(InputError, match="has zero points, but quantization_config says symmetric"):
            open_source(write(tmp_path / "n", settings, encode))


def test_compressed_tensors_in_blocks(tmp_path: Path) -> None:
    want: dict[str, Any] = {}

    def encode(module: str, array: Any, seed: int) -> Any:
        codes, shape = fp8_codes(array.shape, seed), (-(-array.shape[0] // 48), -(-array.shape[1] // 40))
        scales = RNG(seed).standard_normal(shape).astype(np.float32)
        spread = np.kron(scales, np.ones((48, 40), np.float32))[: array.shape[0], : array.shape[1]]
        values = torch.tensor(codes).view(torch.float8_e4m3fn).float().numpy()
        want[f"{module}.weight"] = values * spread
        return {f"{module}.weight": ("F8_E4M3", codes), f"{module}.weight_scale": ("F32", scales)}

    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 40], "symmetric": True}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip
    found = values_of(write(tmp_path / "m", settings, encode))
    assert all(same(found[name], want[name]) for name in want)


@pytest.mark.parametrize("prefix", ["", "language_model.", "model.language_model."])
def test_mlx_settings_of_single_layers(tmp_path: Path, prefix: str) -> None:
    def encode(module: str, array: Any, seed: int) -> Any:
        out = mlx(whole=True)(module, array, seed)
        if module != Q:
            return out
        rng = RNG(seed)
        wide = rng.integers(0, 1 << 32, (array.shape[0], array.shape[1] // 4), np.uint64).astype(np.uint32)
        return out | {f"{module}.weight": ("U32", wide)}

    key = f"{prefix}{Q if prefix != 'model.language_model.' else Q.removeprefix('model.')}"
    settings = {"group_size": 32, "bits": 4, key: {"bits": 8, "group_size": 32}, "lm_head": False}
    with open_source(write(tmp_path / "m", settings, encode, key="quantization")) as source:
        assert source.tensors[f"{Q}.weight"].stored_as == "mlx_8bit_g32"
        assert source.tensors[f"{Q}.weight"].shape == (64, 64)
    with pytest.raises(InputError, match=r"is stored quantized, but config\.json says that it is not"):
        open_source(
            write(tmp_path / "n", {"group_size": 32, "bits": 4, key: False}, mlx(whole=True), key="quantization")
        )
