"""CPU seconds and memory of a calibrated conversion of layers of experts, by default one of Qwen3-30B-A3B's shape.

    python tests/bench/calibrated_experts.py [--experts 128] [--tokens 16384] [--scheme nl4] [--folder DIR]

Random weights in BF16, and a small vocabulary, which counts little beside the experts. Prints the CPU seconds of all
threads by function, and the most anonymous memory that the process has had. DIR takes 1.6 GB.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import pstats
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import tiny_tokenizer, write_safetensors

from w4conv import kernels
from w4conv.commands.quantize import quantize
from w4conv.models import parse_config
from w4conv.models.spec import ModelSpec

N_FUNCTIONS = 16
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 4096, "vocab_size": 300, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def write_checkpoint(folder: Path, config: dict[str, object]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer(300).save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    some = (rng.standard_normal(1 << 20).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    ones = np.uint16(0x3F80)
    tensors = {}
    spec = parse_config(config)
    assert isinstance(spec, ModelSpec)
    for t in spec.tensors():
        n = int(np.prod(t.shape))
        values = np.resize(np.roll(some, int(rng.integers(1 << 20))), n).reshape(t.shape)
        if t.role == "norm":
            values = np.full(t.shape, ones, np.uint16)
        elif t.role == "linear":  # standard deviation 2^-6
            values = np.where(values & 0x7F80 > 0x0400, values - np.uint16(6 << 7), values).astype(np.uint16)
        tensors[t.name] = ("BF16", values)
    write_safetensors(folder / "model.safetensors", tensors)
    letters = rng.choice(list("etaoinshrdlu    "), 1 << 18)
    (folder / "text.txt").write_text("".join(letters))


def watch_memory(most: list[int]) -> None:
    while True:
        status = Path("/proc/self/status").read_text()
        most[0] = max(most[0], int(status.partition("RssAnon:")[2].split()[0]))
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--scheme", default="w4a16")
    parser.add_argument("--group-size", default="128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as tmp:
        folder, out = Path(tmp) / "model", Path(tmp) / "out.w4"
        folder.mkdir()
        writer = multiprocessing.Process(
            target=write_checkpoint, args=(folder, QWEN3_30B_A3B | {"num_experts": options.experts})
        )
        writer.start()
        writer.join()
        most = [0]
        threading.Thread(target=watch_memory, args=(most,), daemon=True).start()
        print(f"{options.experts} experts, {options.tokens} tokens, {options.scheme}, tier {kernels.isa_tier()}")
        profile = cProfile.Profile(time.process_time)
        before = time.process_time()
        report = profile.runcall(
            quantize, folder, out, scheme=options.scheme, group_size=options.group_size,
            calibration=folder / "text.txt", calibration_tokens=options.tokens, threads=options.threads,
        )  # fmt: skip
        spent = time.process_time() - before
    print(*report.notes, sep="\n")
    stats = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    own = [(seconds, f"{Path(file).stem}.{name}") for (file, _, name), (_, _, seconds, _, _) in stats]
    for seconds, name in sorted(own, reverse=True)[:N_FUNCTIONS]:
        print(f"{seconds:9.1f} s  {name}")
    print(f"{spent:9.1f} s  together; most anonymous memory {most[0] / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
