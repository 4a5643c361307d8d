"""Coverage-guided fuzzing of what reads foreign bytes in Python, by atheris:

    python tests/fuzz/fuzz_python.py container -max_total_time=600 corpus/

The first argument names a target of targets.py; the others go to libFuzzer. Without atheris, `--plain SECONDS [SEED]`
runs the same mutations blindly.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def plain(name: str, seconds: float, seed: int) -> None:
    """Without coverage: mutate what was accepted, again and again."""
    from targets import TARGETS, attempt

    target, rng = TARGETS[name], random.Random(seed)
    pool, n, n_accepted = target.seeds(), 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        raw = target.mutate(rng.choice(pool), rng)
        n += 1
        try:
            accepted = attempt(target, raw)
        except BaseException:
            Path(f"crash-{name}-{seed}-{n}").write_bytes(raw)
            raise
        n_accepted += accepted
        if accepted and len(pool) < 2000:
            pool.append(raw)
    print(f"{name}: {n} executions, {n_accepted} accepted, no fault")


def guided(name: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["w4conv", "json"]):
        from targets import TARGETS, attempt

    target = TARGETS[name]

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        mutated = target.mutate(data, rng) if rng.random() < 0.8 else atheris.Mutate(data, max_size)
        return mutated[:max_size]

    folder = Path(arguments[-1])
    folder.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(target.seeds()):
        (folder / f"seed-{i}").write_bytes(seed)
    atheris.Setup(["fuzz", *arguments], lambda data: attempt(target, data) and None, custom_mutator=mutator)
    atheris.Fuzz()


def main() -> None:
    name, arguments = sys.argv[1], sys.argv[2:]
    if arguments[:1] == ["--plain"]:
        plain(name, float(arguments[1]), int(arguments[2]) if len(arguments) > 2 else 1)
    else:
        guided(name, arguments)


if __name__ == "__main__":
    main()
