"""Decode and prefill beside llama.cpp, alternately in one run, on random weights of a real model's shape.

    python tests/bench/against_llama_cpp.py [--shape llama-3.2-1b] [--rounds 3] [--prompt 512] [--tokens 32]
        [--activations int16,int8] [--files DIR]

Needs llama-cpp-python and gguf beside w4conv. llama.cpp gets Q4_0 with a Q8_0 head, w4conv int4/g128 with an int8 head;
both read their weights from a file in the page cache, made in DIR and kept there, or else removed at the end. Each
round also reads our file plainly. Prints each round and the medians of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from w4conv.measure.bandwidth import read_gbs
from w4conv.measure.shapes import SHAPES, RandomWeights
from w4conv.models import parse_config
from w4conv.models.spec import ModelSpec
from w4conv.runtime.engine import Model

Q4, Q8, F16 = (gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q8_0", "F16"))


def random_rows(rng: np.random.Generator, n_rows: int, n_columns: int, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """One row, random, as often as wanted."""
    if kind == F16:
        row = (rng.standard_normal(n_columns) * 0.02).astype(np.float16)
    else:  # blocks of 32 elements that start with a small FP16 scale
        blocks = rng.integers(0, 256, (n_columns // 32, 18 if kind == Q4 else 34), np.uint8)
        blocks[:, :2] = np.frombuffer(np.float16(0.002).tobytes(), np.uint8)
        row = blocks.reshape(-1)
    return np.ascontiguousarray(np.broadcast_to(row, (n_rows, row.size)))


def write_gguf(
    path: Path, spec: ModelSpec, *, kind: gguf.GGMLQuantizationType, head: gguf.GGMLQuantizationType
) -> None:
    """The same shape for llama.cpp, as a Llama model (a Qwen2 shape loses its three biases a layer)."""
    hidden, inner, vocab = spec.hidden_size, spec.intermediate_size, spec.vocab_size
    q_width, kv_width = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(spec.n_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(0)

    def linear(name: str, n_rows: int, n_columns: int, kind: gguf.GGMLQuantizationType = kind) -> None:
        rows = random_rows(rng, n_rows, n_columns, kind)
        writer.add_tensor(name, rows, raw_dtype=None if kind == F16 else kind)

    linear("token_embd.weight", vocab, hidden, head)
    for i in range(spec.n_layers):
        prefix = f"blk.{i}."
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{prefix}{name}.weight", np.ones(hidden, np.float32))
        linear(f"{prefix}attn_q.weight", q_width, hidden)
        linear(f"{prefix}attn_k.weight", kv_width, hidden)
        linear(f"{prefix}attn_v.weight", kv_width, hidden)
        linear(f"{prefix}attn_output.weight", hidden, q_width)
        linear(f"{prefix}ffn_gate.weight", inner, hidden)
        linear(f"{prefix}ffn_up.weight", inner, hidden)
        linear(f"{prefix}ffn_down.weight", hidden, inner)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    if not spec.tied_head:
        linear("output.weight", vocab, hidden, head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def w4conv_runner(
    path: Path, threads: int, n_prompt: int, n_tokens: int, activations: str
) -> Callable[[], tuple[float, float, float]]:
    """Of which a run gives tokens/s of the prompt, tokens/s one by one, and the share of a plain read of the file."""
    model = Model(path, threads=threads, ctx=n_prompt + n_tokens + 1, activations=activations)
    prompt = np.random.default_rng(1).integers(0, 1000, n_prompt)

    def run() -> tuple[float, float, float]:
        session = model.session()
        start = time.perf_counter()
        session.append(prompt)
        middle = time.perf_counter()
        for i in range(n_tokens):
            session.append([i + 5])
        rate = n_tokens / (time.perf_counter() - middle)
        share = rate * model.bytes_per_token / 1e9 / read_gbs(model.container, threads=threads)
        return n_prompt / (middle - start), rate, share

    return run


def llama_cpp_runner(path: Path, threads: int, n_prompt: int, n_tokens: int) -> Callable[[], tuple[float, float]]:
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda *_: None)  # has to outlive the context
    llama_cpp.llama_log_set(quiet, None)
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = n_prompt + n_tokens + 64, 512, 512
    options.n_threads = options.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise RuntimeError("llama.cpp could not load the model")

    def decode(tokens: list[int]) -> None:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) != 0:
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_synchronize(context)

    prompt = np.random.default_rng(1).integers(0, 1000, n_prompt).tolist()

    def run(_quiet: object = quiet) -> tuple[float, float]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        start = time.perf_counter()
        decode(prompt)
        middle = time.perf_counter()
        for i in range(n_tokens):
            decode([i + 5])
        return n_prompt / (middle - start), n_tokens / (time.perf_counter() - middle)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--activations", default="int16")
    parser.add_argument("--files", metavar="DIR")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(args.files or tmp)
        ours, theirs = folder / f"{args.shape}.w4", folder / f"{args.shape}.gguf"
        if not ours.exists():
            RandomWeights(args.shape, scheme="w4a16").write(ours)
        if not theirs.exists():
            write_gguf(theirs, parse_config(SHAPES[args.shape]), kind=Q4, head=Q8)
        print(f"{args.shape}: w4 {ours.stat().st_size / 1e9:.3f} GB, gguf {theirs.stat().st_size / 1e9:.3f} GB")
        modes = args.activations.split(",")
        a = [w4conv_runner(ours, args.threads, args.prompt, args.tokens, mode) for mode in modes]
        b = llama_cpp_runner(theirs, args.threads, args.prompt, args.tokens)
        for run in (*a, b):
            run()
        ratios: list[list[tuple[float, float, float]]] = [[] for _ in modes]
        for i in range(args.rounds):
            pb, db = b()
            for mode, run, found in zip(modes, a, ratios, strict=True):
                pa, da, share = run()
                found.append((pa / pb, da / db, share))
                print(
                    f"round {i + 1} {mode}: prefill {pa:.1f} / {pb:.1f} tokens/s = {pa / pb:.2f}, "
                    f"decode {da:.2f} / {db:.2f} tokens/s = {da / db:.2f}, {share:.2f} of a plain read",
                    flush=True,
                )
        for mode, found in zip(modes, ratios, strict=True):
            prefill, decode, share = (statistics.median(r) for r in zip(*found, strict=True))
            print(
                f"median {mode}: prefill {prefill:.2f} x, decode {decode:.2f} x llama.cpp, {share:.2f} of a plain read"
            )


if __name__ == "__main__":
    main()
