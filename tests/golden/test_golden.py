"""The digests in digests.json: what every tier computes, and what docs/numerics.md and formats/w4-codes.md define."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from checkpoints import CHECKPOINTS, source_of
from compare import DIGESTS, Case, cases, computed, container_digest, convert, differences, logits_digest, tokens
from reference_forward import ReferenceModel, arithmetic, attention, gemm, model, rope
from shifted import by_the_text

from w4conv import codes, kernels
from w4conv.container import open_container
from w4conv.models import known_architectures
from w4conv.quantization.reference import quantize_codes, quantize_rtn
from w4conv.scheme import GROUP_SIZES, KINDS, SCALE_DTYPES
from w4conv.sources import open_source

GOLDEN = json.loads(DIGESTS.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize("tier", kernels.isa_tiers())
def test_every_tier_gives_the_digests(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4CONV_ISA", tier)
    assert differences(computed(tmp_path), GOLDEN) == []


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_the_reference_forward_pass_gives_the_logits(case: Case, folder: Path) -> None:
    with open_container(convert(case, folder)) as container:
        got = ReferenceModel(container, **case.options).logits(tokens(case.n_tokens))
        assert np.ptp(got) > 1
        assert logits_digest(got) == GOLDEN["logits"][case.name]


@pytest.mark.parametrize(
    "case", list({case.container: case for case in cases()}.values()), ids=lambda case: case.container
)
def test_the_reference_quantizer_gives_the_codes(case: Case, folder: Path) -> None:
    path = convert(case, folder)
    with open_container(path) as container, open_source(source_of(case.checkpoint, folder)) as source:
        assert container_digest(container) == GOLDEN["containers"][case.container]
        for name, info in container.tensors.items():
            if info.scheme.is_float or case.scheme == "keep":
                continue  # tested against values: tests/unit, tests/differential
            values = codes.as_f32(source.read(name), source.tensors[name].dtype)
            matrices = []
            for w in values.reshape(codes.matrix_shape(info.shape)):
                if info.scheme.kind in ("int4", "int8"):
                    q, scales = quantize_rtn(w, info.scheme)
                    stored = q if info.scheme.kind == "int8" else (q + 8).astype(np.uint8)
                    matrices.append(codes.pack_matrix(info.scheme, stored, scales))
                elif info.scheme.has_shifts:
                    q, sub_scales, supers = by_the_text(w, info.scheme.kind, info.scheme.group_size)
                    matrices.append(codes.pack_matrix(info.scheme, q, sub_scales, super_scales=supers[:, None]))
                else:
                    matrices.append(codes.pack_matrix(info.scheme, *quantize_codes(w, info.scheme)))
            for part in info.parts:
                want = np.concatenate([m[part.kind] for m in matrices]).tobytes()
                assert container.bytes_of(part).tobytes() == want, (name, part.kind)


def test_the_cases_have_every_architecture_and_scheme(folder: Path) -> None:
    assert {c.architecture for c in CHECKPOINTS.values()} == set(known_architectures())
    schemes = set()
    for case in cases():
        with open_container(convert(case, folder)) as container:
            schemes |= {tensor.scheme for tensor in container.tensors.values()}
    assert {scheme.kind for scheme in schemes} == set(KINDS)
    assert {scheme.group_size for scheme in schemes} == set(GROUP_SIZES)
    assert {scheme.scale_dtype for scheme in schemes} == {"", *SCALE_DTYPES}
    two_levels = {scheme.kind for scheme in schemes if scheme.is_two_level}
    assert two_levels == {"int4", "int4o", "iq4nl", "nl4", "nl3", "int8", "int8o"}


# ---- what a reader of the page could take for granted, each of which the digests tell apart -------------------------


def unfused(a: Any, b: Any, c: Any) -> arithmetic.F32:
    return np.float32(1) * a * b + c


def from_the_left(sums: arithmetic.F32) -> arithmetic.F32:
    return np.cumsum(sums, axis=-1, dtype=np.float32)[..., -1]


def coefficient(i: int, value: float) -> tuple[np.float32, ...]:
    return (*arithmetic.COEFFICIENTS[:i], np.float32(value), *arithmetic.COEFFICIENTS[i + 1 :])


def next_to(x: np.float32) -> np.float32:
    return np.nextafter(x, np.float32(9))


LLAMA, LONG = "llama, f32, 40 tokens, kv f32", "llama, int4/g128, 264 tokens"
MUTANTS: dict[str, tuple[ModuleType, str, Any, str]] = {
    "exp without fma": (arithmetic, "fma", unfused, LLAMA),
    "exp: 1 / 7!": (arithmetic, "COEFFICIENTS", coefficient(0, 1 / 5040), LLAMA),
    "exp: 1 / 6!": (arithmetic, "COEFFICIENTS", coefficient(1, 1 / 720), LLAMA),
    "exp: 1 / 5!": (arithmetic, "COEFFICIENTS", coefficient(2, 1 / 120), LLAMA),
    "exp: 1 / 4!": (arithmetic, "COEFFICIENTS", coefficient(3, 1 / 24), LLAMA),
    "exp: 1 / 3!": (arithmetic, "COEFFICIENTS", coefficient(4, 1 / 6), LLAMA),
    "exp: ln 2 in one part": (arithmetic, "MINUS_LN2_LOW", np.float32(0), LLAMA),
    "exp: ln 2 rounded": (arithmetic, "MINUS_LN2_HIGH", -np.float32(np.log(2)), LLAMA),
    "lanes summed from the left": (arithmetic, "tree", from_the_left, LLAMA),
    "a super-scale for 512 columns": (gemm, "SUPER_COLUMNS", 512, "llama-gguf, keep, 40 tokens"),
    "weights without fma": (gemm, "fma", unfused, "llama, f32, 40 tokens"),
    "levels of 11 bits": (gemm, "CODEBOOKS", gemm.CODEBOOKS | {"nf4": (1024, True)}, "llama, nf4/g64, 40 tokens"),
    "wide levels in blocks of the group": (
        gemm, "CODEBOOKS", gemm.CODEBOOKS | {"fp4": (192, False)}, "llama, fp4/g64, 40 tokens",
    ),
    "attention without fma": (attention, "fma", unfused, LLAMA),
    "KV splits of 128": (attention, "KV_SPLIT", 128, LONG),
    "no attention sinks under a budget": (attention, "SINK_TOKENS", 0, f"{LONG}, kv_memory 180224"),
    "pi / 2 in one part": (rope, "HALF_PI_LOW", 0.0, LONG),
    "gelu: 0.044715": (model, "GELU_CUBE", next_to(model.GELU_CUBE), "gemma2, f32, 40 tokens, kv f32"),
    "gelu: sqrt(8 / pi)": (model, "GELU_SCALE", next_to(model.GELU_SCALE), "gemma2, f32, 40 tokens, kv f32"),
    "gelu without fma": (model, "fma", unfused, "gemma3, f32, 40 tokens, kv f32"),
    "gpt-oss: 1.702": (model, "CLAMPED_SCALE", next_to(model.CLAMPED_SCALE), "gpt_oss, f32, 40 tokens, kv f32"),
    "experts: lanes of the softmax": (
        model, "sum16", lambda p: np.cumsum(p, dtype=np.float32)[-1], "qwen3_moe, f32, 40 tokens, kv f32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_another_arithmetic_shows(mutant: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, value, case_name = MUTANTS[mutant]
    case = next(case for case in cases() if case.name == case_name)
    monkeypatch.setattr(module, name, value)
    with open_container(convert(case, folder)) as container:
        got = ReferenceModel(container, **case.options).logits(tokens(case.n_tokens))
        assert logits_digest(got) != GOLDEN["logits"][case_name]
