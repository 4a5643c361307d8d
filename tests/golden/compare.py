"""Does this processor compute the same? `python tests/golden/compare.py`

Converts the checkpoints of checkpoints.py and runs them, on every ISA tier that the processor has, and compares what
comes out with digests.json: the bytes of all tensors in the container, and the logits, of all tokens at once and of one
after another. Exits with 1 where something differs. `--write` writes digests.json anew, from the best tier.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for PYTHONSAFEPATH

import numpy as np
import numpy.typing as npt
from checkpoints import BASE, CHECKPOINTS, file_of, source_of

import w4conv
from w4conv import kernels
from w4conv.container import Container, open_container
from w4conv.runtime.engine import Model

DIGESTS = Path(__file__).with_name("digests.json")
SHORT, LONG = 40, 264  # tokens; more than a span of keys
KV_MEMORY, KV_MEMORY_INT8 = 180_224, 98_304  # bytes that hold fewer keys and values than the long text has

# How linear weights are coded -> options of w4conv.quantize. Embedding and head are int8 unless told.
SCHEMES: dict[str, dict[str, Any]] = {
    "int4/g32": {"scheme": "w4a16", "group_size": 32},
    "int4/g128": {"scheme": "w4a16", "group_size": 128},
    "int4/row": {"scheme": "w4a16", "group_size": "row", "embeddings": "int4"},
    "int4z/g32": {"scheme": "int4z", "group_size": 32, "embeddings": "int4z"},
    "nl4/g16": {"scheme": "nl4", "group_size": 16},
    "nl4/g32": {"scheme": "nl4", "group_size": 32},
    "nl3/g16": {"scheme": "nl3", "group_size": 16},
    "nl3/g64": {"scheme": "nl3", "group_size": 64, "embeddings": "nl3"},
    "nf4/g64": {"scheme": "nf4", "group_size": 64, "embeddings": "nf4"},
    "fp4/g64": {"scheme": "fp4", "group_size": 64, "embeddings": "fp4"},
    "int8/g128": {"scheme": "w8a16", "group_size": 128},
    "f16": {"scheme": "f16"},
    "bf16": {"scheme": "bf16"},
    "f32": {"scheme": "f32"},
    "keep": {"scheme": "keep"},  # what only other formats have
}
BYTES: dict[str, Any] = {"activations": "int8", "kv": "int8"}


@dataclass(frozen=True)
class Case:
    """A container's logits: of which checkpoint, how coded, after how many tokens, by which options of w4conv.Model."""

    checkpoint: str
    scheme: str
    n_tokens: int
    options: dict[str, Any]

    @property
    def container(self) -> str:
        return f"{self.checkpoint}, {self.scheme}"

    @property
    def name(self) -> str:
        options = "".join(f", {key} {value}" for key, value in self.options.items())
        return f"{self.container}, {self.n_tokens} tokens{options}"


def cases() -> Iterator[Case]:
    for scheme in SCHEMES:
        if scheme != "keep":
            yield Case("llama", scheme, SHORT, {})
            yield Case("llama", scheme, SHORT, BYTES)
    for options in ({}, {"kv_memory": KV_MEMORY}, {"kv": "int8", "kv_memory": KV_MEMORY_INT8}):
        yield Case("llama", "int4/g128", LONG, options)
    yield Case("gpt_oss", "int4/g32", LONG, BYTES)
    for name, checkpoint in CHECKPOINTS.items():
        if name != "llama":
            for options in ({}, BYTES):
                yield Case(name, "keep" if checkpoint.form else "int4/g32", SHORT, options)
        if not checkpoint.form:  # activations of 16 bits would hide the last bits of much
            yield Case(name, "f32", SHORT, {"kv": "f32"})


def tokens(n: int) -> list[int]:
    return [(7 * i * i + 3 * i + 5) % BASE["vocab_size"] for i in range(n)]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def container_digest(container: Container) -> str:
    """Of all tensors' bytes as they lie in the file, padding between them too."""
    parts = [part for tensor in container.tensors.values() for part in tensor.parts]
    data = container.path.read_bytes()
    return sha256(data[min(p.offset for p in parts) : max(p.offset + p.nbytes for p in parts)])


def logits_digest(logits: npt.NDArray[np.float32]) -> str:
    return sha256(logits.astype("<f4").tobytes())


def convert(case: Case, folder: Path) -> Path:
    """The container of a case, made once."""
    path = folder / f"{case.container.replace('/', '-')}.w4"
    if not path.exists():
        w4conv.quantize(source_of(case.checkpoint, folder), path, effort=0, **SCHEMES[case.scheme])
    return path


def computed(folder: Path) -> dict[str, dict[str, str]]:
    """What digests.json holds, by the tier in use."""
    checkpoints: dict[str, str] = {}
    containers: dict[str, str] = {}
    logits: dict[str, str] = {}
    for case in cases():
        path = convert(case, folder)
        with open_container(path) as container, Model(container, **case.options) as model:
            checkpoints[case.checkpoint] = sha256(file_of(case.checkpoint, folder).read_bytes())
            containers[case.container] = container_digest(container)
            ids, session = tokens(case.n_tokens), model.session()
            at_once = logits_digest(model.logits(ids))
            one_by_one = logits_digest(np.concatenate([session.append([i]) for i in ids]))
            logits[case.name] = at_once if at_once == one_by_one else f"{at_once}, one by one {one_by_one}"
    return {"checkpoints": checkpoints, "containers": containers, "logits": logits}


def differences(got: dict[str, dict[str, str]], want: dict[str, dict[str, str]]) -> list[str]:
    out = []
    for part, own in want.items():
        out += [f"{part}: {name}" for name in own if got.get(part, {}).get(name) != own[name]]
        out += [f"{part}: {name} is not in {DIGESTS.name}" for name in got.get(part, {}) if name not in own]
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="Does this processor compute the same?")
    parser.add_argument("--write", action="store_true", help=f"write {DIGESTS.name} anew, from the best tier")
    if parser.parse_args().write:
        with tempfile.TemporaryDirectory() as folder:
            DIGESTS.write_text(json.dumps(computed(Path(folder)), indent=1) + "\n")
        return 0
    want, code = json.loads(DIGESTS.read_text()), 0
    for tier in kernels.isa_tiers():
        os.environ["W4CONV_ISA"] = tier
        with tempfile.TemporaryDirectory() as folder:
            wrong = differences(computed(Path(folder)), want)
        n = sum(len(part) for part in want.values())
        print(f"{tier}: {n} digests, all the same" if not wrong else f"{tier}: {len(wrong)} of {n} digests differ")
        print("".join(f"  {line}\n" for line in wrong), end="")
        code |= bool(wrong)
    return code


if __name__ == "__main__":
    sys.exit(main())
