"""A thread that cannot start, or a task that fails, is an error; what was started has ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import make_llama_dir

from w4conv import quantize

# Of the threads that are asked for while FAIL_AFTER is set, only so many start.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
int pthread_create(pthread_t* t, const pthread_attr_t* a, void* (*f)(void*), void* p) {
  static int n = 0;
  const char* limit = getenv("FAIL_AFTER");
  if (limit == NULL) n = 0;
  if (limit != NULL && n++ >= atoi(limit)) return EAGAIN;
  static int (*next)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (next == NULL) *(void**)&next = dlsym(RTLD_NEXT, "pthread_create");
  return next(t, a, f, p);
}
"""
START = """
import os, sys
import numpy as np
import pytest
import w4conv
from w4conv import kernels
from w4conv.errors import ResourceError
from w4conv.runtime.engine import Model
from w4conv.runtime.layers import LayeredContainer
from w4conv.scheme import F32
"""
CALLS = {
    "model": "Model(path, threads=8)",
    "layer": "LayeredContainer(w4conv.open(path)).layer(0, threads=8)",
    "head": "LayeredContainer(w4conv.open(path)).head(threads=8)",
    "gemm_nt": "kernels.gemm_nt(ones, ones, threads=8)",
    "pack_float": 'kernels.pack_float(ones, "F32", F32, threads=8)',
    "compare": "kernels.compare(ones, ones, 32, threads=8)",
    "dequantize": 'kernels.dequantize(F32, (64, 64), {"values": lines}, threads=8)',
    "matmul": 'kernels.matmul(F32, (64, 64), {"values": lines}, ones, threads=8)',
    "read": "kernels.read(np.zeros(1 << 22, np.uint8), threads=8)",
    "multiply_registers": 'kernels.multiply_registers(operands="float", threads=8)',
    "gemm_tn": "kernels.gemm_tn(ones, ones, np.zeros((64, 64), np.float32), threads=8)",
    "factor": "kernels.factor(ones, np.arange(64), np.ones(64, np.float32), threads=8)",
}
COMMANDS = {
    "run": "run {path} -p the -n 2 -t 2",
    "bench": "bench {path} -n 2 -t 2",
    "verify": "verify {path}",
    "verify against": "verify {path} --against {source} -t 2",
    "quantize": "quantize {source} {out} -t 2",
    "diff": "diff {path} {source}",
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"], check=True, timeout=60
    )
    return folder / "shim.so"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("threads")
    source = make_llama_dir(root / "hf")
    quantize(source, root / "m.w4", group_size=32, effort=0, scheme="w4a16")
    return root / "m.w4", source


def run(*command: object, shim: Path | None, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **variables}
    if shim is not None:
        env["LD_PRELOAD"] = str(shim)
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=120, env=env, check=False
    )


@pytest.mark.parametrize(("call", "n_started"), [*((call, 3) for call in CALLS), ("model", 0), ("gemm_nt", 6)])
def test_calls_name_the_threads_and_work_with_fewer(
    call: str, n_started: int, shim: Path, places: tuple[Path, Path]
) -> None:
    script = f"""{START}
path = sys.argv[1]
ones = np.ones((64, 64), np.float32)
lines = kernels.pack_float(ones, "F32", F32, threads=1)
before = len(os.listdir("/proc/self/task"))
os.environ["FAIL_AFTER"] = "{n_started}"
with pytest.raises(ResourceError, match="{n_started + 1} of 8 threads.*--threads"):
    {CALLS[call]}
assert len(os.listdir("/proc/self/task")) == before
del os.environ["FAIL_AFTER"]
{CALLS[call]}
"""
    done = run("-c", script, places[0], shim=shim)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_end_with_a_message(command: str, shim: Path, places: tuple[Path, Path], tmp_path: Path) -> None:
    words = COMMANDS[command].format(path=places[0], source=places[1], out=tmp_path / "out.w4").split()
    done = run("-m", "w4conv", *words, shim=shim, FAIL_AFTER="0")
    assert done.returncode == 2
    assert "threads" in done.stderr
    assert "internal error" not in done.stderr
    assert not (tmp_path / "out.w4").exists()


@pytest.mark.parametrize("n_threads", [1, 2, 4])
def test_a_task_without_memory_is_a_memory_error(n_threads: int) -> None:
    """Rows so wide that the scratch of a thread no longer fits; the output does."""
    script = f"""{START}
import resource
shape = (64, 1 << 20)
lines = np.zeros((4, 1 << 20, 16), np.uint32)
scheme, threads = F32, {n_threads}
kernels.gemm_nt(np.ones((64, 64), np.float32), np.ones((64, 64), np.float32), threads=threads)
out = np.empty(shape, np.float32)
parts = kernels.matrix_parts(scheme, shape, {{"values": lines}})
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
from w4conv import _native
from w4conv.kernels.pool import native_pool
pool = native_pool(threads)
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), -1))
for _ in range(3):
    with pytest.raises(MemoryError):
        _native.dequantize(pool, parts, out)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
_native.dequantize(pool, parts, out)
assert not out.any()
"""
    done = run("-c", script, shim=None, MALLOC_ARENA_MAX="1")
    assert done.returncode == 0, done.stderr
