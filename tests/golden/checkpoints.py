"""Small checkpoints of every architecture, the same on every machine.

Weights are whole numbers from SplitMix64 times powers of two, which BF16 holds exactly: nothing depends on a library's
random numbers, nor on how floats are rounded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from w4conv.models import parse_config
from w4conv.models.spec import TensorSpec

BASE: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0}
GEMMA = {
    "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 20, "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True, "attn_logit_softcapping": None, "final_logit_softcapping": None,
}  # fmt: skip
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
FULL, SLIDING = "full_attention", "sliding_attention"
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | settings}


@dataclass(frozen=True)
class Checkpoint:
    """form: how matrices are stored: "" as BF16, "mxfp4" gpt-oss's experts so, "mlx" affine, "mlx-mxfp4"; "gguf": one
    file, its matrices in the types of BLOCKS in turn."""

    architecture: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    form: str = ""

    @property
    def config(self) -> dict[str, Any]:
        config = {"architectures": [self.architecture], "model_type": self.model_type}
        if self.model_type == "gemma3":  # the language part of a multimodal model
            return config | {"dtype": "bfloat16", "text_config": BASE | {"model_type": "gemma3_text"} | self.settings}
        return config | BASE | self.settings


TWO_ROPES = {
    "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    }
}
GEMMA3 = GEMMA | TWO_ROPES | {"num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL]}
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
LLAMA = {"hidden_size": 160, "intermediate_size": 288, "num_attention_heads": 4} | LLAMA3
LONG = rope(
    "longrope", partial_rotary_factor=0.75, original_max_position_embeddings=24,
    short_factor=[1 + i / 32 for i in range(6)], long_factor=[2 + i / 4 for i in range(6)],
)  # fmt: skip
CHECKPOINTS = {
    "llama": Checkpoint("LlamaForCausalLM", "llama", LLAMA),
    "llama-biases": Checkpoint(
        "LlamaForCausalLM", "llama",
        {"hidden_size": 104, "attention_bias": True, "mlp_bias": True} | rope("linear", factor=4.0),
    ),
    "llama-dynamic": Checkpoint(
        "LlamaForCausalLM", "llama", {"max_position_embeddings": 24, **rope("dynamic", factor=4.0)}
    ),
    "llama-mlx": Checkpoint(
        "LlamaForCausalLM", "llama", {"quantization": {"group_size": 32, "bits": 4}}, "mlx"
    ),
    "llama-mlx-mxfp4": Checkpoint(
        "LlamaForCausalLM", "llama", {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "mlx-mxfp4"
    ),
    "llama-gguf": Checkpoint(
        "LlamaForCausalLM", "llama", {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}, "gguf"
    ),
    "mistral": Checkpoint("MistralForCausalLM", "mistral", {"sliding_window": 20}),
    "mixtral": Checkpoint("MixtralForCausalLM", "mixtral", {"sliding_window": None} | EXPERTS),
    "qwen2": Checkpoint(
        "Qwen2ForCausalLM", "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": False, "layer_types": [FULL, FULL]}
        | rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "qwen2-partial": Checkpoint(
        "Qwen2ForCausalLM", "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "layer_types": [SLIDING, FULL]}
        | rope("default", partial_rotary_factor=0.5),
    ),
    "qwen3": Checkpoint("Qwen3ForCausalLM", "qwen3", {"head_dim": 24, "use_sliding_window": False}),
    "qwen3_moe": Checkpoint(
        "Qwen3MoeForCausalLM", "qwen3_moe",
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_hidden_layers": 3,
         "decoder_sparse_step": 1, "mlp_only_layers": [1], "norm_topk_prob": False, "head_dim": 16,
         "use_sliding_window": False},
    ),
    "smollm3": Checkpoint(
        "SmolLM3ForCausalLM", "smollm3",
        {"attention_bias": True, "no_rope_layers": [1, 0], "use_sliding_window": False, "layer_types": [FULL, FULL]},
    ),
    "phi3": Checkpoint(
        "Phi3ForCausalLM", "phi3",
        {"sliding_window": 30, "layer_types": [SLIDING, SLIDING], "original_max_position_embeddings": 24} | LONG,
    ),
    "gemma2": Checkpoint(
        "Gemma2ForCausalLM", "gemma2",
        GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "layer_types": [SLIDING, FULL]},
    ),
    "gemma3": Checkpoint("Gemma3ForCausalLM", "gemma3_text", GEMMA3),
    "gemma3-multimodal": Checkpoint("Gemma3ForConditionalGeneration", "gemma3", GEMMA3),
    "olmo2": Checkpoint("Olmo2ForCausalLM", "olmo2"),
    "granite": Checkpoint("GraniteForCausalLM", "granite", GRANITE),
    "granitemoe": Checkpoint("GraniteMoeForCausalLM", "granitemoe", GRANITE | EXPERTS),
    "gpt_oss": Checkpoint(
        "GptOssForCausalLM", "gpt_oss",
        {"sliding_window": 20, "head_dim": 16, "attention_bias": True, "layer_types": [SLIDING, FULL]} | EXPERTS
        | rope("yarn", factor=8.0, original_max_position_embeddings=32, truncate=False),
    ),
    "gpt_oss-mxfp4": Checkpoint(
        "GptOssForCausalLM", "gpt_oss",
        {"sliding_window": None, "head_dim": 16, "attention_bias": True, "layer_types": [FULL, FULL]} | EXPERTS
        | rope("yarn", factor=8.0, original_max_position_embeddings=32, truncate=False) | MXFP4,
        "mxfp4",
    ),
}  # fmt: skip


def words(name: str, n: int) -> npt.NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea and Flood 2014), its state starting from the SHA-256 of a name."""
    seed = np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + seed
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def small(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Whole numbers from -128 to 127."""
    n = int(np.prod(shape))
    return (words(name, n) >> np.uint64(56)).astype(np.int32).astype(np.float32).reshape(shape) - np.float32(128)


def values(t: TensorSpec) -> npt.NDArray[np.float32]:
    whole = small(t.name, t.shape)
    if t.role == "norm":
        return np.float32(1) + whole * np.float32(2**-7)
    if t.role == "bias":
        return whole * np.float32(2**-7)
    return whole * np.float32(2**-7 if t.part in ("q_proj", "k_proj", "qkv_proj", "embed_tokens") else 2**-9)


Stored = tuple[str, tuple[int, ...], bytes]  # dtype, shape, little-endian bytes


def bf16(x: npt.NDArray[np.float32]) -> Stored:
    bits = np.ascontiguousarray(x).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return "BF16", x.shape, (bits >> 16).astype("<u2").tobytes()


def f16(x: npt.NDArray[np.float32]) -> Stored:
    half = x.astype("<f2")
    assert (half.astype(np.float32) == x).all()
    return "F16", x.shape, half.tobytes()


def stored(t: TensorSpec, checkpoint: Checkpoint) -> Iterator[tuple[str, Stored]]:
    """The tensors of the file that stand for one of the model."""
    name, x = t.name, values(t)
    if checkpoint.model_type == "gemma3":
        name = "language_model." + name
    codes = words(t.name, max(x.size // 8, 1))
    is_expert = t.role == "linear" and len(t.shape) == 3
    if checkpoint.form == "mxfp4" and is_expert:
        rows, groups = t.shape[:2], t.shape[2] // 32
        exponents = (words(f"{t.name} scales", int(np.prod(rows)) * groups) >> np.uint64(62)) + np.uint64(120)
        yield f"{name}_blocks", ("U8", (*rows, groups, 16), codes.astype("<u8").tobytes()[: x.size // 2])
        yield f"{name}_scales", ("U8", (*rows, groups), exponents.astype(np.uint8).tobytes())
    elif checkpoint.form.startswith("mlx") and t.role == "linear":
        module, groups = name.removesuffix(".weight"), t.shape[1] // 32
        yield name, ("U32", (t.shape[0], t.shape[1] // 8), codes.astype("<u8").tobytes()[: x.size // 2])
        scales = words(f"{t.name} scales", t.shape[0] * groups)
        if checkpoint.form == "mlx-mxfp4":
            exponents = (scales >> np.uint64(62)) + np.uint64(120)
            yield f"{module}.scales", ("U8", (t.shape[0], groups), exponents.astype(np.uint8).tobytes())
        else:
            steps = ((scales >> np.uint64(57)) + np.uint64(1)).astype(np.float32).reshape(-1, groups)
            offsets = small(f"{t.name} biases", (t.shape[0], groups)) * np.float32(2**-12)
            yield f"{module}.scales", f16(steps * np.float32(2**-12))
            yield f"{module}.biases", f16(offsets - steps * np.float32(2**-9))
    elif is_expert and checkpoint.model_type == "gpt_oss":  # which keeps its experts with columns first
        yield name, bf16(np.ascontiguousarray(np.swapaxes(x, 1, 2)))
    else:
        yield name, bf16(x)


@dataclass(frozen=True)
class Block:
    """Of a type of GGUF. number: that stands for it in a file. halves: where its FP16 numbers lie, of about
    2^-exponent. scales: where bytes lie that are numbers in E4M3."""

    number: int
    columns: int
    nbytes: int
    halves: tuple[int, ...]
    exponent: int
    scales: int = 0


BLOCKS = {  # between them every scheme that holds them
    "Q8_0": Block(8, 32, 34, (0,), 9), "Q5_1": Block(7, 32, 24, (0, 2), 7), "IQ4_NL": Block(20, 32, 18, (0,), 9),
    "NVFP4": Block(40, 64, 36, (), 0, 4), "TQ2_0": Block(35, 256, 66, (64,), 3),
    "IQ4_XS": Block(23, 256, 136, (0,), 14), "Q2_K": Block(10, 256, 84, (80, 82), 7),
    "Q3_K": Block(11, 256, 110, (108,), 9),
    "Q4_K": Block(12, 256, 144, (0, 2), 12), "Q5_K": Block(13, 256, 176, (0, 2), 13),
    "Q6_K": Block(14, 256, 210, (208,), 14), "IQ3_S": Block(21, 256, 110, (0,), 10),
    "IQ2_XS": Block(17, 256, 74, (0,), 8),
}  # fmt: skip


def blocks(name: str, shape: tuple[int, ...], kind: Block) -> bytes:
    """Bytes of any value; an FP16 number has either sign and any fraction."""
    n = int(np.prod(shape)) // kind.columns
    raw = words(name, -(-n * kind.nbytes // 8)).astype("<u8").view(np.uint8)[: n * kind.nbytes].reshape(n, kind.nbytes)
    for at in kind.halves:
        bits = raw[:, at].astype(np.uint16) | raw[:, at + 1].astype(np.uint16) << 8
        halves = (bits & 0x83FF | (15 - kind.exponent) << 10).astype("<u2")
        raw[:, at : at + 2] = halves[:, None].view(np.uint8)
    raw[:, : kind.scales] = raw[:, : kind.scales] & 0x1F | 0x10  # 2^-5 to 2^-2
    return raw.tobytes()


def gguf_text(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


def gguf_name(name: str) -> str:
    for old, new in (
        ("model.layers", "blk"), ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"),
        ("lm_head", "output"), ("post_attention_layernorm", "ffn_norm"), ("input_layernorm", "attn_norm"),
        ("self_attn.o_proj", "attn_output"), ("self_attn.", "attn_"), ("mlp.", "ffn_"), ("_proj", ""),
    ):  # fmt: skip
        name = name.replace(old, new)
    return name


def write_gguf(checkpoint: Checkpoint, path: Path) -> Path:
    """Version 3: metadata, index, data at multiples of 32."""
    config = checkpoint.config
    numbers = {
        "llama.block_count": config["num_hidden_layers"], "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"], "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
    }  # fmt: skip
    metadata = gguf_text("general.architecture") + (8).to_bytes(4, "little") + gguf_text("llama")
    for key, number in numbers.items():
        metadata += gguf_text(key) + (4).to_bytes(4, "little") + number.to_bytes(4, "little")
    epsilon = np.array(config["rms_norm_eps"], "<f4").tobytes()
    metadata += gguf_text("llama.attention.layer_norm_rms_epsilon") + (6).to_bytes(4, "little") + epsilon
    index, data, kinds = b"", b"", list(BLOCKS.values())
    tensors = list(parse_config(config).tensors())
    for t in tensors:
        if len(t.shape) == 1:
            number, raw = 0, values(t).astype("<f4").tobytes()
        else:
            kinds.append(kinds.pop(0))
            number, raw = kinds[-1].number, blocks(t.name, t.shape, kinds[-1])
        index += gguf_text(gguf_name(t.name)) + len(t.shape).to_bytes(4, "little")
        index += b"".join(n.to_bytes(8, "little") for n in reversed(t.shape))
        index += number.to_bytes(4, "little") + len(data).to_bytes(8, "little")
        data += raw + b"\0" * (-len(raw) % 32)
    header = b"GGUF" + (3).to_bytes(4, "little") + len(tensors).to_bytes(8, "little")
    header += (len(numbers) + 2).to_bytes(8, "little") + metadata + index
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)
    return path


def file_of(name: str, folder: Path) -> Path:
    """What holds the tensors of a checkpoint."""
    return folder / name / ("model.gguf" if CHECKPOINTS[name].form == "gguf" else "model.safetensors")


def source_of(name: str, folder: Path) -> Path:
    """The checkpoint for w4conv to read, written once."""
    path = file_of(name, folder)
    if not path.exists():
        write_checkpoint(name, path.parent)
    return path if path.suffix == ".gguf" else path.parent


def write_checkpoint(name: str, directory: Path) -> Path:
    """A Hugging Face directory, or a GGUF file in it, its bytes the same everywhere."""
    checkpoint = CHECKPOINTS[name]
    directory.mkdir(parents=True, exist_ok=True)
    if checkpoint.form == "gguf":
        return write_gguf(checkpoint, directory / "model.gguf")
    (directory / "config.json").write_text(json.dumps(checkpoint.config, indent=1) + "\n")
    header, data = {}, b""
    for t in parse_config(checkpoint.config).tensors():
        for key, (dtype, shape, raw) in stored(t, checkpoint):
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
            data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return directory
