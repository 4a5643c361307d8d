"""What of a model stays in the memory of the process that runs it."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from helpers import make_llama_dir

from w4conv.commands.quantize import quantize
from w4conv.container import Container
from w4conv.runtime.engine import Model


def mapped_share(container: Container, name: str) -> float:
    """Of the pages of a tensor's codes or values, those that this process has mapped."""
    raw = container.bytes_of(container.tensors[name].parts[0])
    first, end = (address // mmap.PAGESIZE for address in (raw.ctypes.data, raw.ctypes.data + raw.nbytes))
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
            pages.seek(8 * first)
            entries = np.frombuffer(pages.read(8 * (end - first)), np.uint64)
    except OSError:
        pytest.skip("this system does not tell which pages are mapped")
    return float(np.mean(entries >> np.uint64(63)))


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_an_embedding_do_not_stay(tmp_path: Path, tied: bool) -> None:
    source = make_llama_dir(tmp_path / "src", vocab=16384, tied=tied, config={"max_position_embeddings": 512})
    quantize(source, tmp_path / "m.w4", scheme="w8a16", effort=0)
    with Model(tmp_path / "m.w4") as model:
        container, session = model.container, model.session()
        tokens = np.random.default_rng(0).integers(0, 16384, 360)
        session.append(tokens[:100])
        assert mapped_share(container, "model.embed_tokens.weight") > 0.3
        for part in (tokens[100:239], tokens[239:240], tokens[240:]):  # a pass fills up within a call, and at its end
            logits = session.append(part)
        assert (mapped_share(container, "model.embed_tokens.weight") > 0.3) == tied  # the head, if tied
        if not tied:
            assert mapped_share(container, "lm_head.weight") > 0.9
        assert np.array_equal(logits, model.session().append(tokens))
        container.release("model.embed_tokens.weight")
        assert mapped_share(container, "model.embed_tokens.weight") < 0.1
