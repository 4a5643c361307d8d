"""A small trained model that tells a story, as a Hugging Face directory, with a tokenizer trained on that story.

stories260K of the shared data where that is; else a model of our own, made once into pytest's cache: float32, float16
and bfloat16 of the same weights, and in `sample_greedy.txt` what transformers reads from it, greedily.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import as_dtype, shared_data, write_safetensors
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from w4conv.calibration import builtin

STORY = """Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she \
found a small red boat under a tree. "Whose boat is this?" she asked. Nobody knew. Lily put the boat on the water, \
and the wind took it to the other side. There stood a boy who had looked for it all morning. He was so happy that he \
gave her half of his cake, and they played until the sun went down.
The cat was big. The cat was red. It sat on the wall and saw all of it, and it wanted some of the cake too."""
VOCAB, CTX, STEPS = 512, 512, 150
SETTINGS = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 172,
    "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCAB,
    "max_position_embeddings": CTX, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = SETTINGS | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 3, "head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
TYPES = {"f32": ("F32", "float32"), "f16": ("F16", "float16"), "bf16": ("BF16", "bfloat16")}


def trained(dtype: str = "f32") -> Path:
    """The directory of the model in `dtype`: "f32", "f16" or "bf16"."""
    return shared_data("hf", f"stories260K-{dtype}") or _own() / dtype


def trained_experts() -> tuple[Path, str, str]:
    """The directory of a mixture of experts in BF16, always of our own; the text that it was trained on, and one of the
    same kind that it has not seen."""
    return _own() / "experts", *_prose()


def _prose() -> tuple[str, str]:
    text = (Path(builtin.__file__).parent / "texts" / "prose.txt").read_text(encoding="utf-8")
    return text[: len(text) * 3 // 4], text[len(text) * 3 // 4 :]


@cache
def _own() -> Path:
    torch = pytest.importorskip("torch", reason="torch trains the model of the test; install the oracle group")
    recipe = hashlib.sha256(Path(__file__).read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    made = Path(os.environ["W4CONV_TEST_CACHE"]) / f"stories-{recipe}"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=made.parent) as tmp:
            _make(Path(tmp) / "out")
            try:
                (Path(tmp) / "out").rename(made)
            except OSError:  # another process was faster
                assert made.exists()
    return made


def piece_tokenizer(text: str) -> Tokenizer:
    """BPE as a conversion of a SentencePiece model has it: U+2581 for spaces, bytes for what has no piece."""
    named = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    space = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = space
    trained.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=named, show_progress=False)
    trained.train_from_iterator(text.splitlines(), trainer)
    document = json.loads(trained.to_str())
    document["added_tokens"] = document["added_tokens"][:3]
    document["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def _make(folder: Path) -> None:
    import torch
    import transformers

    tokenizer = piece_tokenizer(STORY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more are slower on something this small
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SETTINGS))
    story = tokenizer.encode(STORY).ids

    def part_of_story(step: int) -> list[list[int]]:  # from the start, and from places in it
        start = 0 if step % 2 == 0 else int(torch.randint(1, len(story) - 100, ()))
        return [[1, *story[1:][start : start + (150 if start == 0 else 80)]]]

    loss = _train(model, STEPS, part_of_story)
    assert loss < 0.5, "the model has not learned its story"
    with torch.no_grad():
        told = model.generate(torch.tensor([[1]]), do_sample=False, max_new_tokens=110, pad_token_id=2)
    torch.manual_seed(0)
    experts = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**EXPERTS))
    prose_tokenizer = piece_tokenizer(_prose()[0])
    prose = prose_tokenizer.encode(_prose()[0]).ids

    def parts_of_prose(_: int) -> list[list[int]]:
        return [prose[i : i + 64] for i in torch.randint(0, len(prose) - 64, (8,)).tolist()]

    loss = _train(experts, 2 * STEPS, parts_of_prose)
    assert loss < 4.5, "the mixture has learned nothing"  # ln 512 is 6.2
    torch.set_num_threads(threads)
    experts.to(torch.bfloat16).save_pretrained(folder / "experts")
    prose_tokenizer.save(str(folder / "experts" / "tokenizer.json"))
    for name, (stored, written) in TYPES.items():
        directory = folder / name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(SETTINGS | {"torch_dtype": written}))
        tokenizer.save(str(directory / "tokenizer.json"))
        weights = {key: value.detach().numpy() for key, value in model.named_parameters()}  # a tied head comes once
        write_safetensors(
            directory / "model.safetensors", {key: (stored, as_dtype(value, stored)) for key, value in weights.items()}
        )
        (directory / "sample_greedy.txt").write_text(tokenizer.decode(told[0].tolist()))


def _train(model: Any, n_steps: int, batch: Callable[[int], list[list[int]]]) -> float:
    """The last loss."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    for step in range(n_steps):
        ids = torch.tensor(batch(step))
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    return float(loss.item())
