"""Small checkpoints written to disk, for tests. Names, shapes and files are spelled out here, not taken from w4conv."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

Array = npt.NDArray[np.generic]
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def shared_data(*parts: str) -> Path | None:
    """A folder or file of the shared test data, which a public clone does not have; None where it is absent."""
    root = Path(os.environ.get("W4CONV_TEST_DATA", Path(__file__).parents[1] / "../shared/data")).resolve()
    path = root.joinpath(*parts)
    return path if path.exists() else None


def data_dir(*parts: str) -> Path:
    """The same; skips the test where it is absent. For figures that others published of just these files."""
    path = shared_data(*parts)
    if path is None:
        pytest.skip(f"shared test data {'/'.join(parts)} is absent (set W4CONV_TEST_DATA)")
    return path


def real_configs() -> dict[str, dict[str, Any]]:
    """config.json of published models by name: what the models are, out of real_configs.json; the whole files of the
    shared data in place of that where they are."""
    configs: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("real_configs.json").read_text())
    if folder := shared_data("configs"):
        configs |= {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/config.json"))}
    return configs


# Texts that tokenizers stumble on: white space, digits, apostrophes, scripts, marks, emoji, what looks like code.
HARD_TEXTS = (
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\t\n", " \n  \n", "\r\n\r\n", "\u0085\u2028\u2029",
    "Hello", " Hello",
    "Hello  world", "HELLO WORLD!", " this is 🦙.w4", "w048 7tuijk dsdfhu", "I'll you've WE'RE 'sit don't",
    "3", "33", "333",
    "33333333", "1,234.5e-6 ½ ² Ⅷ", "!!!!!!", "?!.,;:", "a\u0301 e\u0308 \u1112\u1161\u11ab", "ﬁ ① ｶﾞ", "Zoë naïveÉcole",
    "x\u3000y\u00a0z\u200bw", "нещо на български", "កាន់តែពិសេស", "漢字かな交じり文", "你好。世界",
    "한국어", "שלום עולם",
    "مرحبا بالعالم", "नमस्ते", "ไทย", "🚀 (normal) 😶\u200d🌫️ (joined) 👩🏽\u200d🚀 🇩🇪",
    "if (a<b) { return c[0]; } // x\n\tdone\n",
    "https://example.org/a?b=c&d=%20", "camelCaseXMLHttp snake_case kebab-case", "a" * 40,
    "=\n\n\n  ==", "ied 4 ½ months",
)  # fmt: skip


def hard_texts(name: str) -> list[str]:
    """HARD_TEXTS, and those that llama.cpp tests its vocabulary `name` with where the shared data is."""
    file = shared_data("tokenizer-vectors", f"ggml-vocab-{name}.gguf.inp")
    return [*HARD_TEXTS, *(file.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n") if file else ())]


def english() -> str:
    """Some pages of English."""
    demo = Path(__file__).parents[1] / "docs/demo"
    return (demo / "text.txt").read_text() + (demo / "score.txt").read_text()


def bf16_bits(values: Array) -> npt.NDArray[np.uint16]:
    """BF16 bits (uint16) of finite values, rounded half to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def as_dtype(values: Array, dtype: str) -> Array:
    """float32 values as what a source returns for `dtype`: float16, uint16 with BF16 bits, or float32."""
    if dtype == "BF16":
        return bf16_bits(values)
    return values.astype({"F16": np.float16, "F32": np.float32}[dtype])


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, Array]]) -> None:
    """Write {name: (dtype word such as "BF16", array)} as one safetensors file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tiny_tokenizer(vocab_size: int = 300) -> Tokenizer:
    """Byte-level BPE: 256 bytes, `<s>` (256) and `</s>` (257), then merges while they fit in `vocab_size` (>= 258)."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(symbols)} | {BOS: 256, EOS: 257}
    merges: list[tuple[str, str]] = []
    for word in ("the", "Ġthe", "and", "Ġand", "Ġof", "ing", "Ġto", "Ġin", "er", "Ġis", "Ġa"):
        left = word[0]
        for right in word[1:]:
            if left + right not in vocab and len(vocab) < vocab_size:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
            left += right
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 256)])
    tokenizer.add_special_tokens([AddedToken(BOS, normalized=False), AddedToken(EOS, normalized=False)])
    return tokenizer


def llama_tensors(
    *,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    tied: bool,
    biases: Sequence[str],
    seed: int,
) -> dict[str, npt.NDArray[np.float32]]:
    """Random float32 weights of a Llama-shaped model under their Hugging Face names."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)

    out = {"model.embed_tokens.weight": normal(vocab, hidden)}
    for i in range(layers):
        linears = {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for part in ("input_layernorm", "post_attention_layernorm"):
            out[f"model.layers.{i}.{part}.weight"] = 1 + normal(hidden)
        for module, shape in linears.items():
            out[f"model.layers.{i}.{module}.weight"] = normal(*shape)
            if module.rsplit(".", 1)[1] in biases:
                out[f"model.layers.{i}.{module}.bias"] = normal(shape[0])
    out["model.norm.weight"] = 1 + normal(hidden)
    if not tied:
        out["lm_head.weight"] = normal(vocab, hidden)
    return out


# Of the words that the tiny tokenizers know: a text to calibrate by, repeated.
WORDS = "the and of ing to in er is a. The thing is in the end of it, and her other hand. "


def make_llama_dir(
    directory: Path,
    *,
    dtype: str = "F16",
    architecture: str = "LlamaForCausalLM",
    hidden: int = 64,
    inner: int = 96,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocab: int = 300,
    tied: bool = False,
    biases: Sequence[str] | None = None,
    shards: int = 1,
    config: Mapping[str, object] | None = None,
    tokenizer: bool = True,
    seed: int = 0,
) -> Path:
    """Write a tiny Hugging Face directory with random weights; returns `directory`, made if absent.

    dtype: "F16", "BF16" or "F32". architecture: LlamaForCausalLM, MistralForCausalLM or Qwen2ForCausalLM.
    head_dim: written to config.json only when given. biases: modules that have one ("q_proj", ...; default: q, k, v
    for Qwen2, else none). shards: files that the tensors are spread over. config: keys to add or replace; None deletes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    qwen2 = architecture == "Qwen2ForCausalLM"
    if biases is None:
        biases = ("q_proj", "k_proj", "v_proj") if qwen2 else ()
    settings: dict[str, object] = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}[dtype],
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    if head_dim is not None:
        settings["head_dim"] = head_dim
    if architecture == "LlamaForCausalLM":
        settings |= {"attention_bias": "q_proj" in biases, "mlp_bias": "up_proj" in biases}
    if architecture == "MistralForCausalLM":
        settings["sliding_window"] = None
    for key, value in (config or {}).items():
        settings[key] = value
        if value is None and key != "sliding_window":
            del settings[key]
    (directory / "config.json").write_text(json.dumps(settings, indent=2))
    generation = {"bos_token_id": 256, "eos_token_id": [257]}
    (directory / "generation_config.json").write_text(json.dumps(generation))

    weights = llama_tensors(
        hidden=hidden, inner=inner, layers=layers, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads, vocab=vocab, tied=tied, biases=biases, seed=seed,
    )  # fmt: skip
    stored = {name: (dtype, as_dtype(values, dtype)) for name, values in weights.items()}
    if shards == 1:
        write_safetensors(directory / "model.safetensors", stored)
    else:
        names = list(stored)
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            mine = names[i * len(names) // shards : (i + 1) * len(names) // shards]
            write_safetensors(directory / file, {name: stored[name] for name in mine})
            weight_map |= dict.fromkeys(mine, file)
        index = {"metadata": {"total_size": sum(a.nbytes for _, a in stored.values())}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    if tokenizer:
        tiny_tokenizer(vocab).save(str(directory / "tokenizer.json"))
        words = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True}
        (directory / "tokenizer_config.json").write_text(json.dumps(words))
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor with a Hugging Face name."""
    if name in GGUF_TOP:
        return GGUF_TOP[name]
    _, _, layer, part = name.split(".", 3)
    module, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_PARTS[module]}.{kind}"


def interleave_heads(values: Array, n_heads: int) -> Array:
    """Rows of q or k (or its bias) in the order in which GGUF stores them for the llama architecture."""
    head_dim = values.shape[0] // n_heads
    split = values.reshape(n_heads, 2, head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)


def make_llama_gguf(
    path: Path,
    *,
    qtype: str = "F16",
    arch: str = "llama",
    hidden: int = 64,
    inner: int = 96,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocab: int = 300,
    tied: bool = False,
    biases: Sequence[str] = (),
    tokenizer: bool = True,
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
    blocks: Callable[[str, tuple[int, ...]], tuple[npt.NDArray[np.uint8], str]] | None = None,
    seed: int = 0,
) -> Path:
    """Write a tiny GGUF file with the weights of `make_llama_dir`, matrices as `qtype` (any the gguf package writes).

    arch: "llama" or "qwen2". edit: called with the writer before it writes, to add keys or tensors. blocks: bytes
    and type of each matrix in place of its values. Returns `path`.
    """
    kind = gguf.GGMLQuantizationType[qtype]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(layers)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if tokenizer:
        model = json.loads(tiny_tokenizer(vocab).to_str())["model"]
        tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
        tokens += [f"[PAD{i}]" for i in range(len(tokens), vocab)]
        types = [3 if t in (BOS, EOS) else 5 if t.startswith("[PAD") else 1 for t in tokens]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges([" ".join(m) for m in model["merges"]])
        writer.add_bos_token_id(256)
        writer.add_eos_token_id(257)
        writer.add_add_bos_token(True)
        writer.add_chat_template(CHAT_TEMPLATE)
    weights = llama_tensors(
        hidden=hidden, inner=inner, layers=layers, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads, vocab=vocab, tied=tied, biases=biases, seed=seed,
    )  # fmt: skip
    for name, values in weights.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleave_heads(values, heads if "q_proj" in name else kv_heads)
        if values.ndim > 1 and blocks is not None:
            raw, own = blocks(name, values.shape)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType[own])
        elif values.ndim == 1 or qtype == "F32":
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
