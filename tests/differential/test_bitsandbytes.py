"""NF4 and FP4 codes against bitsandbytes, bit for bit, where the largest magnitude of a group is exact in FP16."""

from __future__ import annotations

import os

import numpy as np
import pytest

from w4conv import codes, kernels
from w4conv.scheme import QuantScheme

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
torch = pytest.importorskip("torch", reason="torch is an oracle; install the oracle dependency group")
bitsandbytes = pytest.importorskip("bitsandbytes", reason="an oracle; install the oracle dependency group")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_codes_are_those_of_bitsandbytes(kind: str, dtype: str, group_size: int) -> None:
    shape = (24, 512)
    x = np.random.default_rng(1).standard_normal(shape) * np.exp(np.random.default_rng(2).uniform(-6, 3, (24, 1)))
    x[3, 256:] = 0
    x[5] = np.round(x[5] * 64) / 64
    tensor = torch.from_numpy(x).to(torch.float16 if dtype == "F16" else torch.bfloat16)
    packed, state = bitsandbytes.functional.quantize_4bit(tensor, blocksize=group_size, quant_type=kind)
    pairs = packed.numpy().reshape(-1)
    theirs = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(shape)

    raw = tensor.view(torch.uint16).numpy()
    scheme = QuantScheme(kind, group_size, "f16")
    ours = kernels.quantize_rtn(raw.view(np.float16) if dtype == "F16" else raw, dtype, scheme)
    parts = ours.raw_parts()
    np.testing.assert_array_equal(codes.unpack(scheme, ours.codes[None], *shape)[0], theirs)
    scales = codes.unpack_rows(ours.scales[None], shape[0])[0]
    np.testing.assert_array_equal(scales.astype(np.float32).reshape(-1), state.absmax.numpy())
    values = bitsandbytes.functional.dequantize_4bit(packed, state).to(torch.float32).numpy()
    np.testing.assert_allclose(codes.dequantize(scheme, shape, parts), values, rtol=2**-8, atol=0)
