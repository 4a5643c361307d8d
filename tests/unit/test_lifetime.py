"""What is closed, deleted, shared or forked in any order works, or raises ClosedError; nothing kills the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import make_llama_dir

from w4conv import quantize

# What every scenario begins with. WANTED: logits of a model that nothing happens to. churn: memory that was let go of
# is taken by others, so that a stale pointer shows.
START = """
import gc, os, sys, threading, time
import numpy as np
import pytest
import w4conv
from w4conv import kernels
from w4conv.errors import ClosedError, UsageError
from w4conv.runtime.engine import Model
from w4conv.runtime.layers import LayeredContainer, LayeredSource
from w4conv.sources import open_source

path, source, gguf = sys.argv[1:]
IDS = list(range(5, 45))
with Model(path, threads=2) as model:
    WANTED = model.logits(IDS)

def churn():
    gc.collect()
    return [np.full(1 << 16, 7, np.uint8) for _ in range(8)]

def same(logits):
    churn()
    assert logits.shape[0] in (1, len(IDS))
    assert (logits[-1] == WANTED[-1]).all()

def closed(f, *args, **named):
    churn()
    with pytest.raises(ClosedError, match="is closed"):
        f(*args, **named)
"""

SCENARIOS = {
    "session after close": """
        model = Model(path, threads=2); session = model.session(); session.append(IDS[:9]); model.close()
        closed(session.append, [3]); closed(session.truncate, 2); assert session.n_tokens == 9
        closed(model.session); closed(model.logits, IDS); closed(model.kv_nbytes, 0)
        closed(model.part_seconds); closed(model.restart_stopwatch)
    """,
    "half-consumed generate": """
        model = Model(path, threads=2); tokens = model.generate(IDS, max_tokens=20)
        next(tokens), next(tokens); model.close(); closed(next, tokens); tokens.close()
    """,
    "generate not begun": """
        model = Model(path); tokens = model.generate(IDS, max_tokens=3); model.close(); closed(next, tokens)
        closed(model.generate, IDS, max_tokens=1)
    """,
    "container closed under a model": """
        container = w4conv.open(path); model = Model(container, threads=2); session = model.session()
        session.append(IDS[:7]); container.close(); same(session.append(IDS[7:])); same(model.logits(IDS))
        del container; same(model.logits(IDS)); model.close(); closed(model.logits, IDS)
    """,
    "container deleted under a model": """
        model = Model(w4conv.open(path)); model.container.close(); del model.container
        session = model.session(); same(session.append(IDS))
    """,
    "close twice, and after with": """
        container = w4conv.open(path)
        with Model(container) as model: pass
        model.close(); model.close(); container.close(); container.close()
        with Model(path) as model: model.close()
        source_ = open_source(source); source_.close(); source_.close()
    """,
    "only the session lives": """
        session = Model(path, threads=2).session(); same(session.append(IDS))
        model = Model(path); session = model.session(); model.container.close(); del model; same(session.append(IDS))
    """,
    "only the generator lives": """
        first = [int(WANTED[-1].argmax())]
        tokens = Model(path).generate(IDS, max_tokens=5); churn(); assert [next(tokens)] == first; list(tokens)
    """,
    "views outlive their container": """
        container = w4conv.open(path); name = "model.layers.0.mlp.up_proj.weight"
        view = container.part(name, "codes"); copy = view.copy(); values = container.dequantize(name)
        container.close(); churn(); assert (view == copy).all() and np.isfinite(values).all()
        closed(container.part, name, "codes"); closed(container.dequantize, name); closed(container.check)
        closed(container.blobs.__getitem__, "config.json"); container.release(name); del container; churn()
        assert (view == copy).all()
    """,
    "closed container": """
        container = w4conv.open(path); container.close(); closed(Model, container)
        closed(container.check_tensor, "model.norm.weight")
        assert container.tensors and container.digest
    """,
    "views outlive their source": """
        for place in (source, gguf):
            opened = open_source(place); name = "model.layers.0.mlp.up_proj.weight"
            values = opened.read(name); copy = values.copy(); other = open_source(place); opened.close(); churn()
            assert (values == copy).all(); closed(opened.read, name); closed(opened.read, name, slice(0, 16))
            assert (other.read(name) == copy).all()
            del opened, other; churn(); assert (values == copy).all()
    """,
    "layers outlive what they came from": """
        container = w4conv.open(path); layered = LayeredContainer(container)
        hidden = layered.embed(np.array(IDS)); head = layered.head()
        loaded = [layered.layer(i).model for i in range(2)]
        container.close(); del container; closed(layered.layer, 0); del layered; churn()
        for layer in loaded: layer.run(hidden)
        same(head.logits(hidden))
        opened = open_source(source); layered = LayeredSource(opened); layer = layered.layer(0).model
        opened.close(); closed(layered.layer, 1); del opened, layered; churn(); layer.run(hidden)
    """,
    "a matrix whose arrays are gone": """
        from w4conv.scheme import F32
        lines = kernels.pack_float(np.eye(16, dtype=np.float32), "F32", F32)
        parts = kernels.matrix_parts(F32, (16, 16), {"values": lines}); del lines; churn()
        y = np.empty((3, 16), np.float32); x = np.arange(48, dtype=np.float32).reshape(3, 16)
        from w4conv import _native
        _native.matmul(_native.Pool(2), parts, x, y, 16); assert (y == x).all()
    """,
    "closed while it runs": """
        for pause in (0, 0.001, 0.004, 0.02):
            model = Model(path, threads=2, ctx=256); seen = []
            def run(session):
                try:
                    while session.n_tokens < 250: session.append([3])
                except Exception as error: seen.append(error)
            threads = [threading.Thread(target=run, args=(model.session(),)) for _ in range(4)]
            for t in threads: t.start()
            time.sleep(pause); model.close()
            for t in threads: t.join(30)
            assert not any(t.is_alive() for t in threads)
            assert all(type(e) is ClosedError for e in seen), seen
    """,
    "container closed while it is read": """
        for _ in range(20):
            container = w4conv.open(path); seen = []
            def run():
                try:
                    for _ in range(200):
                        container.dequantize("model.norm.weight"); container.release("lm_head.weight")
                except Exception as error: seen.append(error)
            threads = [threading.Thread(target=run) for _ in range(3)]
            for t in threads: t.start()
            container.close()
            for t in threads: t.join(30)
            assert all(type(e) is ClosedError for e in seen), seen
    """,
    "one session, many threads, too little room": """
        model = Model(path, threads=2, ctx=64); session = model.session(); refused, other = [], []
        def run(n):
            for _ in range(40):
                try: session.append([n] * n)
                except UsageError as error: refused.append((n, str(error)))
                except Exception as error: other.append(error)
        threads = [threading.Thread(target=run, args=(n,)) for n in (1, 2, 3, 5)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert not other and refused and session.n_tokens == 64, (other, session.n_tokens)
        assert all("do not fit" in words for _, words in refused)
        # What ran is one sequence of whole calls: running it again gives the same state.
        ids = list(session._ids); again = model.session(); again.append(ids[:-1]); session.truncate(63)
        assert (session.append(ids[-1:]) == again.append(ids[-1:])).all()
        i = 0
        while i < 64:
            assert ids[i : i + ids[i]] == [ids[i]] * ids[i]; i += ids[i]
    """,
    "truncate against append": """
        model = Model(path, threads=2, ctx=256); session = model.session(); session.append(IDS); other = []
        def cut():
            for _ in range(60):
                try: session.truncate(10)
                except Exception as error: other.append(error)
        def grow():
            for _ in range(60):
                try: session.append([7] * 5)
                except UsageError: pass
                except Exception as error: other.append(error)
        threads = [threading.Thread(target=f) for f in (cut, grow, cut, grow)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert not other, other
        session.truncate(min(10, session.n_tokens)); same(session.append(IDS[10:]))
    """,
    "forked": """
        model = Model(path, threads=2); session = model.session(); session.append(IDS[:10])
        ones = np.ones((64, 64), np.float32); kernels.gemm_nt(ones, ones, threads=2)
        for n in range(3):
            child = os.fork()
            if child == 0:
                try:
                    same(model.logits(IDS)); same(session.append(IDS[10:]))
                    kernels.gemm_nt(ones, ones, threads=2)
                    assert len(os.listdir("/proc/self/task")) > 1, "the child works with as many threads"
                    model.close(); closed(session.append, [1]); del model, session; gc.collect()
                    os._exit(0)
                except BaseException as error:
                    print(repr(error), file=sys.stderr); os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
        same(session.append(IDS[10:])); same(model.logits(IDS))
    """,
    "forked while another thread runs": """
        model = Model(path, threads=2, ctx=256); stop = []
        def run():
            while not stop: model.logits(IDS * 4)
        thread = threading.Thread(target=run); thread.start()
        for n in range(12):
            time.sleep(0.003); child = os.fork()
            if child == 0:
                try: same(model.logits(IDS))
                except (UsageError, ValueError) as error: os._exit(0 if "forked" in str(error) else 2)
                except BaseException: os._exit(1)
                os._exit(0)
            for _ in range(2000):
                done, status = os.waitpid(child, os.WNOHANG)
                if done: break
                time.sleep(0.01)
            else: os.kill(child, 9); raise AssertionError("the child hangs")
            assert status == 0, status
        stop.append(1); thread.join()
    """,
    "end of the interpreter": """
        model = Model(path, threads=2); session = model.session()
        tokens = model.generate(IDS, max_tokens=9); next(tokens)
        view = w4conv.open(path).part("lm_head.weight", "codes")
        threading.Thread(target=lambda: list(tokens), daemon=True).start()
    """,
    "cycles": """
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
            container = w4conv.open(path); model = Model(container); session = model.session(); session.append([1])
            held = [container, model, session]; del container, model, session
            for i in order: held[i] = None; churn()
            ring = [Model(path)]; ring.append(ring); ring.append(ring[0].session()); del ring; churn()
    """,
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A container, the directory it came from, and a GGUF file of it."""
    from w4conv.commands.export import export

    root = tmp_path_factory.mktemp("lifetime")
    source = make_llama_dir(root / "hf", config={"max_position_embeddings": 512})
    quantize(source, root / "m.w4", group_size=32, effort=0, scheme="w4a16")
    export(root / "m.w4", root / "m.gguf", to="gguf")
    return root / "m.w4", source, root / "m.gguf"


def run(body: str, places: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    lines = body.rstrip().split("\n")
    indent = len(lines[1]) - len(lines[1].lstrip())
    script = START + "\n".join(line[indent:] for line in lines)
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, places)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", "MALLOC_PERTURB_": "165"},
        check=False,
    )


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_any_order_of_use_and_close(scenario: str, places: tuple[Path, Path, Path]) -> None:
    done = run(SCENARIOS[scenario], places)
    assert done.returncode == 0, done.stderr
