"""The digests in digests.json: what every tier computes, and what docs/numerics.md and formats/w4-codes.md define."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import CHECKPOINTS
from compare import DIGESTS, Case, cases, computed, container_digest, convert, differences, logits_digest, tokens
from reference_forward import ReferenceModel

from w4conv import codes, kernels
from w4conv.container import open_container
from w4conv.models import known_architectures
from w4conv.quantization.reference import quantize_codes, quantize_rtn
from w4conv.scheme import BITS
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
    with open_container(path) as container, open_source(folder / case.checkpoint) as source:
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
                else:
                    matrices.append(codes.pack_matrix(info.scheme, *quantize_codes(w, info.scheme)))
            for part in info.parts:
                want = np.concatenate([m[part.kind] for m in matrices]).tobytes()
                assert container.bytes_of(part).tobytes() == want, (name, part.kind)


def test_the_cases_have_every_architecture_and_scheme(folder: Path) -> None:
    assert {c.architecture for c in CHECKPOINTS.values()} == set(known_architectures())
    kinds = set()
    for case in cases():
        with open_container(convert(case, folder)) as container:
            kinds |= {tensor.scheme.kind for tensor in container.tensors.values()}
    assert kinds == set(BITS)
