"""The picture of docs/performance.md: `python tests/bench/roofline.py > docs/roofline.svg`.

Bench of a shape's three codings, drawn as the report draws them. Options: --shape, --prompt, --tokens, --rounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from w4conv.cli._report import roofline
from w4conv.commands.bench import bench
from w4conv.container import open_container
from w4conv.measure.shapes import SHAPES, RandomWeights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--prompt", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        containers = []
        for scheme in ("f16", "w8a16", "w4a16"):
            path = folder / f"{scheme}.w4"
            RandomWeights(args.shape, scheme=scheme).write(path)
            containers.append((f"{args.shape} {scheme}", stack.enter_context(open_container(path))))
        report = bench(containers, n_prompt=args.prompt, n_tokens=args.tokens, rounds=args.rounds)
        sys.stdout.write(roofline(report, alone=True))


if __name__ == "__main__":
    main()
