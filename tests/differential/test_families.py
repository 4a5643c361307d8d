"""The table of families in docs/architectures.md: what is supported, and what each is compared with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from helpers import real_configs
from test_engine import MODELS

from w4conv.models import FAMILIES

PAGE = Path(__file__).parents[2] / "docs/architectures.md"
BEGIN, END = "<!-- families: written by tests/differential/test_families.py -->", "<!-- end -->"
# What people know an architecture by.
NAMES = {
    "LlamaForCausalLM": "Llama 2, 3, 3.1, 3.2; SmolLM2; Falcon 3",
    "MistralForCausalLM": "Mistral, Mistral Nemo",
    "MixtralForCausalLM": "Mixtral",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3 mixtures of experts",
    "SmolLM3ForCausalLM": "SmolLM3",
    "Phi3ForCausalLM": "Phi-3, Phi-3.5, Phi-4-mini",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3, text",
    "Gemma3ForConditionalGeneration": "Gemma 3, the language part",
    "Olmo2ForCausalLM": "OLMo 2",
    "GraniteForCausalLM": "Granite 3",
    "GraniteMoeForCausalLM": "Granite 3 mixtures of experts",
    "GptOssForCausalLM": "gpt-oss",
}
# Tests beside the common ones.
MORE = {
    "LlamaForCausalLM": "perplexity of SmolLM2-135M",
    "Gemma3ForConditionalGeneration": "logits of a model with a vision part",
}


def table() -> str:
    tiny = Counter(kind for kind, _ in MODELS.values())
    real: dict[str, list[str]] = {}
    for name, config in sorted(real_configs().items()):
        real.setdefault(config["architectures"][0], []).append(name)
    lines = ["| architecture | models | compared with transformers | real configs |", "|---|---|---|---|"]
    for family in FAMILIES:
        for architecture, kind in family.ARCHITECTURES.items():
            checks = [f"{tiny[kind]} tiny model{'s' if tiny[kind] > 1 else ''}"] if tiny[kind] else []
            checks += [MORE[architecture]] if architecture in MORE else []
            assert checks, f"{architecture} is compared with nothing"
            configs = ", ".join(real.get(architecture, ())) or "-"
            lines.append(f"| `{architecture}` | {NAMES[architecture]} | {'; '.join(checks)} | {configs} |")
    return "\n".join(lines)


def test_the_page_names_every_family_and_its_tests() -> None:
    written = PAGE.read_text()
    assert BEGIN in written
    assert written.split(BEGIN)[1].split(END)[0].strip() == table(), f"{PAGE} should say:\n{table()}"
