"""Kernels by themselves, for each ISA tier of this machine.

    python tests/bench/kernels.py [--threads N] [--rounds 7]

GEMV: 4096 x 4096 matrices over a working set of 1 GB, in GB/s of codes, beside a plain read of the same bytes measured
alternately. GEMM: one such matrix times 120 tokens, in GMAC/s. Medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from w4conv import codes, cpus, kernels
from w4conv.scheme import QuantScheme, int4, int8

N = K = 4096
WORKING_SET = 1 << 30
N_TOKENS = 120
SCHEMES = (int4(128), int8(128), QuantScheme("f16"), QuantScheme("bf16"), QuantScheme("f32"))


def seconds(run: Callable[..., object], *args: object, **options: object) -> float:
    start = time.perf_counter()
    run(*args, **options)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=cpus.default_threads())
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    noise = np.tile(np.frombuffer(rng.bytes(1 << 26), np.uint8), WORKING_SET >> 26)
    flat = np.full_like(noise, 0x3C)  # bytes 3C 3C ...: a small number in every float scheme
    one = rng.standard_normal((1, K)).astype(np.float32)
    many = rng.standard_normal((N_TOKENS, K)).astype(np.float32)
    print(f"{args.threads} threads, medians of {args.rounds} rounds")
    print(f"{'tier':11}{'scheme':12}{'GEMV GB/s':>10}{'read GB/s':>10}{'share':>7}{'GEMM GMAC/s':>12}")
    for tier in kernels.isa_tiers()[1:]:
        os.environ["W4CONV_ISA"] = tier
        for scheme in SCHEMES:
            data = flat if scheme.is_float else noise
            sizes = codes.part_sizes(scheme, (N, K))
            nbytes = sizes["values" if scheme.is_float else "codes"]
            scales = np.full(sizes.get("scales", 0) // 2, 0.01, np.float16)

            def product(
                x: npt.NDArray[np.float32],
                i: int,
                scheme: QuantScheme = scheme,
                data: npt.NDArray[np.uint8] = data,
                nbytes: int = nbytes,
                scales: npt.NDArray[np.float16] = scales,
            ) -> None:
                part = data[i * nbytes : (i + 1) * nbytes]
                parts: dict[str, npt.NDArray[np.generic]] = {"codes": part, "scales": scales, "values": part}
                kernels.matmul(scheme, (N, K), parts, x, threads=args.threads)

            def products(n: int, product: Callable[..., None] = product) -> None:
                for i in range(n):
                    product(one, i)

            gemv, read, gemm = [], [], []
            for _ in range(args.rounds):
                read.append(data.size / seconds(kernels.read, data, threads=args.threads) / 1e9)
                gemv.append(data.size / seconds(products, data.size // nbytes) / 1e9)
                gemm.append(N * K * N_TOKENS / seconds(product, many, 0) / 1e9)
            share = statistics.median(a / b for a, b in zip(gemv, read, strict=True))
            a, b, c = (statistics.median(v) for v in (gemv, read, gemm))
            print(f"{tier:11}{scheme!s:12}{a:10.1f}{b:10.1f}{share:7.2f}{c:12.0f}")


if __name__ == "__main__":
    main()
