"""The engine against transformers (float32, CPU), and against itself: tiers, threads, chunkings."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import data_dir

import w4conv
from w4conv import kernels
from w4conv.container import open_container
from w4conv.models import FAMILIES
from w4conv.runtime.engine import Model

torch = pytest.importorskip("torch", reason="torch is the oracle; install the oracle dependency group")
transformers = pytest.importorskip("transformers", reason="transformers is the oracle; install the oracle group")

F32 = npt.NDArray[np.float32]
N_TOKENS = 64
SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HALF = N_TOKENS // 2


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


FACTORS = {"short_factor": [1 + i / 40 for i in range(6)], "long_factor": [2 + i / 4 for i in range(6)]}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 5}


def few_experts(kind: str) -> dict[str, Any]:
    """A handful in place of the many that a mixture of experts has by default."""
    return EXPERTS if hasattr(transformers.CONFIG_MAPPING[kind](), "num_experts_per_tok") else {}


# name -> (model_type, what differs from SIZES)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Every family as it comes, so that a new one is tested by being there.
    **{
        kind: (kind, few_experts(kind))
        for family in FAMILIES
        for kind in family.ARCHITECTURES.values()
        if kind != "gemma3"  # the multimodal one
    },
    "llama-gqa-tied-576": (
        "llama",
        {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "llama-mha-biases": (
        "llama",
        {"hidden_size": 104, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-rope-llama3": (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=HALF),
    ),
    "llama-rope-linear": ("llama", {"num_key_value_heads": 1, **rope("linear", factor=4.0)}),
    "llama-rope-dynamic": ("llama", {"max_position_embeddings": HALF, **rope("dynamic", factor=4.0)}),
    "mistral-head-dim-window": ("mistral", {"hidden_size": 96, "head_dim": 32, "sliding_window": 20}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "mixtral-window": ("mixtral", {"sliding_window": 20, **EXPERTS}),
    "qwen2-tied": ("qwen2", {"hidden_size": 128, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2-upper-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=HALF)),
    "qwen3-head-dim-24": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_moe-some-dense": (
        "qwen3_moe",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_hidden_layers": 4,
         "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "smollm3-nope": ("smollm3", {"num_hidden_layers": 4, "attention_bias": True}),
    "phi3-partial-window": (
        "phi3",
        {"sliding_window": 20, "num_key_value_heads": 4, **rope("default", partial_rotary_factor=0.5)},
    ),
    "phi3-longrope": (
        "phi3",
        {"original_max_position_embeddings": HALF,
         **rope("longrope", partial_rotary_factor=0.75, original_max_position_embeddings=HALF, **FACTORS)},
    ),
    "gemma2-window": (
        "gemma2",
        {"sliding_window": 20, "head_dim": 32, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": 3.0},
    ),
    "gemma3-two-ropes": (
        "gemma3_text",
        {"sliding_window": 20, "num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 20,
         "rope_parameters": {
             "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
    "granite-multipliers": (
        "granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    ),
    "granitemoe-multipliers": (
        "granitemoe",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, **EXPERTS},
    ),
    "gpt_oss-window": (
        "gpt_oss",
        {"sliding_window": 20, "head_dim": 16, **EXPERTS,
         **rope("yarn", factor=8.0, original_max_position_embeddings=HALF, truncate=False)},
    ),
}  # fmt: skip
# Models whose rotary embedding depends on the length of the sequence, so that one pass of the oracle over all tokens
# is not what a sequence sees as it grows: "cached", token by token with a cache; "prefixes", each prefix by itself.
GROWING = {"llama-rope-dynamic": "cached", "phi3-longrope": "prefixes"}


class Case:
    """A random model of transformers, saved, with its logits and greedy tokens."""

    def __init__(self, name: str, folder: Path) -> None:
        kind, arguments = MODELS[name]
        torch.manual_seed(len(name))
        self.growing = GROWING.get(name, "")
        config = transformers.AutoConfig.for_model(kind, **SIZES | arguments)
        config._attn_implementation = "eager"
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for key, value in self.model.state_dict().items():
                if key.endswith(("bias", "norm.weight", "layernorm.weight", "sinks")):
                    value.add_(torch.randn_like(value) * 0.1)
                elif "embed_tokens" not in key:
                    value.mul_(4)  # attention that is not flat, tokens that differ
        self.folder = folder / name
        self.model.save_pretrained(self.folder)
        self.tokens = np.random.default_rng(3).integers(0, SIZES["vocab_size"], N_TOKENS)

    @functools.cached_property
    def want(self) -> F32:
        return self.logits(self.tokens)

    def logits(self, tokens: npt.NDArray[np.integer] | list[int]) -> F32:
        """After each token."""
        ids = torch.tensor(np.asarray(tokens))[None]
        with torch.no_grad():
            if self.growing == "prefixes":
                rows = [self.model(ids[:, : i + 1]).logits[0, -1] for i in range(ids.shape[1])]
            elif self.growing == "cached":
                rows, cache = [], None
                for i in range(ids.shape[1]):
                    out = self.model(ids[:, i : i + 1], cache=cache, use_cache=True)
                    cache = out.cache
                    rows.append(out.logits[0, -1])
            else:
                rows = list(self.model(ids).logits[0])
        out: F32 = torch.stack(rows).numpy()
        return out


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("scheme", ["f32", "keep"])
def test_logits_equal_transformers(case: Case, tmp_path: Path, scheme: str) -> None:
    w4conv.quantize(case.folder, tmp_path / "m.w4", scheme=scheme)
    with Model(tmp_path / "m.w4", kv="f32") as model:
        got = model.logits(case.tokens)
    want = case.want
    assert np.ptp(want) > 1  # the comparison would be empty on flat logits
    assert np.abs(got - want).max() < 1e-4


def test_greedy_tokens_equal_transformers(case: Case, tmp_path: Path) -> None:
    w4conv.quantize(case.folder, tmp_path / "m.w4", scheme="f32")
    prompt = case.tokens[:8].tolist()
    with Model(tmp_path / "m.w4", kv="f32") as model:
        got = list(model.generate(prompt, max_tokens=64))
    # The tokens are the oracle's if at each step they are its choice on what came before.
    want = case.logits(prompt + got)[len(prompt) - 1 : -1].argmax(1)
    assert got == want.tolist()


@pytest.mark.parametrize("scheme", ["w4a16", "f16"])
def test_the_bits_depend_on_no_tier_thread_or_chunking(
    case: Case, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, logits = set(), set()
    for tier in kernels.isa_tiers():
        monkeypatch.setenv("W4CONV_ISA", tier)
        for threads, pieces in ((1, [N_TOKENS]), (2, [1] * N_TOKENS), (2, [13, 1, 50])):
            path = tmp_path / f"{tier}-{threads}-{len(pieces)}.w4"
            w4conv.quantize(case.folder, path, scheme=scheme, threads=threads)
            files.add(path.read_bytes())
            with Model(path, threads=threads) as model:
                assert (model.isa, model.threads) == (tier, threads)
                session, rows, start = model.session(), [], 0
                for n in pieces:
                    rows.append(session.append(case.tokens[start : start + n], all_logits=True))
                    start += n
                logits.add(np.concatenate(rows).tobytes())
    assert len(files) == 1
    assert len(logits) == 1


def test_int8_is_close_and_int4_is_near(case: Case, tmp_path: Path) -> None:
    """A coding that went wrong somewhere would be off by the size of the logits."""
    want = case.want
    errors = {}
    for scheme in ("w8a16", "w4a16"):
        w4conv.quantize(case.folder, tmp_path / f"{scheme}.w4", scheme=scheme, group_size=32)
        with Model(tmp_path / f"{scheme}.w4") as model:
            of_tokens = ((model.logits(case.tokens) - want) ** 2).mean(1) / np.var(want)
            # The median: where experts are chosen, a small error makes a few tokens choose another one.
            errors[scheme] = float(np.sqrt(np.median(of_tokens)))
    assert errors["w8a16"] < 0.05
    assert errors["w8a16"] < errors["w4a16"] < 0.6


def test_a_truncated_session_goes_on_as_if_new(case: Case, tmp_path: Path) -> None:
    w4conv.quantize(case.folder, tmp_path / "m.w4")
    with Model(tmp_path / "m.w4") as model:
        session = model.session()
        session.append(case.tokens)
        session.truncate(10)
        again = session.append(case.tokens[10:], all_logits=True)
        np.testing.assert_array_equal(again, model.logits(case.tokens)[10:])


def test_stories260k_tells_its_documented_story(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = data_dir("hf", "stories260K-f32")
    w4conv.quantize(folder, tmp_path / "m.w4", scheme="keep")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    want = (folder / "sample_greedy.txt").read_text().strip()
    with Model(tmp_path / "m.w4") as model:
        bos = tokenizer.token_to_id("<s>")
        text = tokenizer.decode(list(model.generate([bos], max_tokens=model.ctx - 1, stop_ids=[bos])))
    assert text.strip()[: len(want)] == want[: len(text.strip())]
    assert len(text) > 200


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_stories260k_of_other_types_runs(tmp_path: Path, dtype: str) -> None:
    folder = data_dir("hf", f"stories260K-{dtype}")
    for scheme in ("keep", "w4a16"):
        w4conv.quantize(folder, tmp_path / f"{scheme}.w4", scheme=scheme, group_size=32)
        with Model(tmp_path / f"{scheme}.w4") as model:
            assert np.isfinite(model.logits(list(range(1, 60)))).all()
    with open_container(tmp_path / "keep.w4") as container:
        assert {t.scheme.kind for t in container.tensors.values()} == {dtype}
