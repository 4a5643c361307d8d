"""Perplexity and divergence of llama.cpp's types on a text, for docs/accuracy.md.

    w4conv calibrate MODEL speeches.txt -o stats.safetensors
    w4conv quantize MODEL f16.w4 --scheme f16 && w4conv export f16.w4 f16.gguf --to gguf
    python tests/bench/llama_cpp_accuracy.py f16.gguf wiki.test.raw [--chunks 32] [--statistics stats.safetensors]

Needs llama-cpp-python and gguf beside w4conv. Each type is made by llama.cpp's own quantizer from the GGUF file; with
statistics, also with an importance matrix of the mean squares of what each product reads (the head's is left out, as
llama-imatrix does). The base is the GGUF file as it is, run by llama.cpp too; windows, scores and divergence are those
of `w4conv verify --kld`. llama.cpp waits by spinning, so it gets one thread unless told.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt

from w4conv.measure.divergence import compare_models
from w4conv.measure.layerwise import ScoredBlock
from w4conv.measure.perplexity import Windows, estimate, make_windows

F32Array = npt.NDArray[np.float32]
TYPES = {
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "IQ4_XS": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_XS,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}
READS = {
    "attn_q": "qkv", "attn_k": "qkv", "attn_v": "qkv", "attn_output": "o", "ffn_gate": "gate_up", "ffn_up": "gate_up",
    "ffn_down": "down",
}  # fmt: skip


def mean_squares(path: Path) -> dict[str, F32Array]:
    """By the names of the tensors in GGUF."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    found = {}
    for layer in range(sum(name.endswith(".down.mean_square") for name in header)):
        for part, place in READS.items():
            begin, end = header[f"layers.{layer}.{place}.mean_square"]["data_offsets"]
            fit, _ = np.frombuffer(data[8 + size + begin : 8 + size + end], np.float32).reshape(2, -1)
            found[f"blk.{layer}.{part}.weight"] = fit
    return found


def quantize(source: Path, out: Path, kind: str, matrix: dict[str, F32Array], threads: int) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = TYPES[kind], threads
    rows = [np.ascontiguousarray(values) for values in matrix.values()]
    entries = (llama_cpp.llama_model_imatrix_data * (len(rows) + 1))()  # the last one, without a name, ends them
    for entry, name, values in zip(entries, matrix, rows, strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if matrix:
        params.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    if llama_cpp.llama_model_quantize(bytes(source), bytes(out), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp could not make {kind}")


def bits_per_weight(path: Path) -> float:
    tensors = gguf.GGUFReader(path).tensors
    return float(sum(8 * int(t.n_bytes) for t in tensors) / sum(int(t.n_elements) for t in tensors))


def open_model(path: Path, n_ctx: int, threads: int) -> Any:
    return llama_cpp.Llama(
        str(path), n_ctx=n_ctx, n_batch=n_ctx, n_ubatch=n_ctx, n_threads=threads, n_threads_batch=threads,
        logits_all=True, verbose=False,
    )  # fmt: skip


def logits(model: Any, tokens: list[int], first: int) -> F32Array:
    model.reset()
    model.eval(tokens)
    return np.asarray(model.scores[first : len(tokens) - 1], np.float32)


def blocks(model: Any, folder: Path, windows: Windows) -> Iterator[ScoredBlock]:
    """folder: with the logits of the base."""
    first = windows.first_target - 1
    for i, tokens in enumerate(windows.tokens.tolist()):
        yield ScoredBlock(i, first, (logits(model, tokens, first), np.load(folder / f"{i}.npy")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--statistics", type=Path)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    matrix = mean_squares(args.statistics) if args.statistics else {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        base = open_model(args.gguf, args.ctx, args.threads)
        ids = base.tokenize(args.text.read_bytes(), add_bos=False, special=False)
        bos = base.token_bos() if base.metadata.get("tokenizer.ggml.add_bos_token") == "true" else None
        windows = make_windows(
            ids if bos is None else [bos, *ids], convention="llama.cpp", ctx=args.ctx, bos_id=bos, chunks=args.chunks
        )
        first = windows.first_target - 1
        for i, tokens in enumerate(windows.tokens.tolist()):
            np.save(folder / f"{i}.npy", logits(base, tokens, first))
        base.close()
        for kind in args.types:
            for with_matrix in (False, True) if matrix else (False,):
                out = folder / f"{kind}.gguf"
                quantize(args.gguf, out, kind, matrix if with_matrix else {}, args.threads)
                model = open_model(out, args.ctx, args.threads)
                found = compare_models(blocks(model, folder, windows), windows)
                model.close()
                d, ppl, of_base = found.divergence(), estimate(found.nlls), estimate(found.base_nlls)
                name = f"{kind} with importances" if with_matrix else kind
                print(
                    f"{name}: {bits_per_weight(out):.3f} bits, perplexity "
                    f"{ppl.value:.4f} +/- {ppl.stderr:.4f} (base {of_base.value:.4f}), KLD {d.mean:.5f} +/- "
                    f"{d.stderr:.5f}, same top token {100 * d.same_top:.2f} %, RMS delta p {100 * d.rms_delta_p:.2f} %",
                    flush=True,
                )
                out.unlink()


if __name__ == "__main__":
    main()
