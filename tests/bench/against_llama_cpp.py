"""Decode and prefill beside llama.cpp, alternately in one run, on random weights of a real model's shape.

    python tests/bench/against_llama_cpp.py [--shape 135m|0.5b|1b|8b] [--rounds 3] [--prompt 512] [--tokens 32]

Needs llama-cpp-python and gguf beside w4conv. llama.cpp gets Q4_0 with a Q8_0 head, w4conv int4/g128 with an int8 head;
both read their weights from a file in the page cache. Prints each round and the medians of the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

SHAPES = {  # hidden, intermediate, layers, heads, KV heads, head_dim, vocabulary, tied head
    "135m": (576, 1536, 30, 9, 3, 64, 49152, True),
    "0.5b": (896, 4864, 24, 14, 2, 64, 151936, True),
    "1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
}


def random_blocks(rng: np.random.Generator, n_rows: int, n_columns: int, block_nbytes: int) -> np.ndarray:
    """Rows of 32-element blocks that start with a small FP16 scale; one row's random bytes, rolled for each row."""
    row = rng.integers(0, 256, (n_columns // 32, block_nbytes), np.uint8)
    row[:, :2] = np.frombuffer(np.float16(0.002).tobytes(), np.uint8)
    return np.broadcast_to(row.reshape(-1), (n_rows, row.size))


def write_gguf(path: Path, shape: tuple[int, ...]) -> None:
    hidden, inner, n_layers, heads, kv_heads, head_dim, vocab, tied = shape
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(0)
    q4, q8 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0

    def linear(name: str, n_rows: int, n_columns: int, kind: gguf.GGMLQuantizationType) -> None:
        data = random_blocks(rng, n_rows, n_columns, 18 if kind == q4 else 34)
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)

    linear("token_embd.weight", vocab, hidden, q8)
    for i in range(n_layers):
        prefix = f"blk.{i}."
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{prefix}{name}.weight", np.ones(hidden, np.float32))
        linear(f"{prefix}attn_q.weight", heads * head_dim, hidden, q4)
        linear(f"{prefix}attn_k.weight", kv_heads * head_dim, hidden, q4)
        linear(f"{prefix}attn_v.weight", kv_heads * head_dim, hidden, q4)
        linear(f"{prefix}attn_output.weight", hidden, heads * head_dim, q4)
        linear(f"{prefix}ffn_gate.weight", inner, hidden, q4)
        linear(f"{prefix}ffn_up.weight", inner, hidden, q4)
        linear(f"{prefix}ffn_down.weight", hidden, inner, q4)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    if not tied:
        linear("output.weight", vocab, hidden, q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_w4(path: Path, shape: tuple[int, ...]) -> None:
    from w4conv import codes
    from w4conv.container import TensorPlan, Writer, open_target, plan
    from w4conv.models import parse_config
    from w4conv.scheme import F32, int4, int8

    hidden, inner, n_layers, heads, kv_heads, head_dim, vocab, tied = shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": n_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    rng = np.random.default_rng(0)
    tensors = []
    for t in parse_config(config).tensors():
        scheme = F32 if t.role == "norm" else int4(128) if t.role == "linear" else int8(128)
        tensors.append(TensorPlan(t.name, t.shape, scheme, "F16"))
    provenance = {"tool": "bench", "source": {"kind": "random", "files": []}}
    layout = plan(tensors, {"config.json": json.dumps(config).encode()}, provenance)
    noise = rng.integers(0, 256, 1 << 22, np.uint8)
    with open_target(path, layout.file_nbytes) as file:
        writer = Writer(file, layout)
        for t in tensors:
            for kind, nbytes in codes.part_sizes(t.scheme, t.shape).items():
                if kind == "codes":
                    while nbytes > 0:
                        writer.write(t.name, kind, noise[:nbytes])
                        nbytes -= min(nbytes, noise.size)
                elif kind == "scales":
                    writer.write(t.name, kind, np.full(nbytes // 2, 0.002, np.float16))
                else:
                    writer.write(t.name, kind, np.ones(nbytes // 4, np.float32))
        writer.finish([])


def w4conv_runner(path: Path, threads: int, n_prompt: int, n_tokens: int) -> Callable[[], tuple[float, float]]:
    from w4conv.runtime.engine import Model

    model = Model(path, threads=threads, ctx=n_prompt + n_tokens + 1)
    prompt = np.random.default_rng(1).integers(0, 1000, n_prompt)

    def run() -> tuple[float, float]:
        session = model.session()
        start = time.perf_counter()
        session.append(prompt)
        middle = time.perf_counter()
        for i in range(n_tokens):
            session.append([i + 5])
        return n_prompt / (middle - start), n_tokens / (time.perf_counter() - middle)

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
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        ours, theirs = Path(tmp) / "model.w4", Path(tmp) / "model.gguf"
        write_w4(ours, SHAPES[args.shape])
        write_gguf(theirs, SHAPES[args.shape])
        print(f"{args.shape}: w4 {ours.stat().st_size / 1e9:.3f} GB, gguf {theirs.stat().st_size / 1e9:.3f} GB")
        a = w4conv_runner(ours, args.threads, args.prompt, args.tokens)
        b = llama_cpp_runner(theirs, args.threads, args.prompt, args.tokens)
        a(), b()
        ratios = []
        for i in range(args.rounds):
            (pa, da), (pb, db) = a(), b()
            ratios.append((pa / pb, da / db))
            print(
                f"round {i + 1}: prefill {pa:.1f} / {pb:.1f} tokens/s = {pa / pb:.2f}, "
                f"decode {da:.2f} / {db:.2f} tokens/s = {da / db:.2f}"
            )
        prefill, decode = (statistics.median(r) for r in zip(*ratios, strict=True))
        print(f"median: prefill {prefill:.2f} x, decode {decode:.2f} x llama.cpp")


if __name__ == "__main__":
    main()
